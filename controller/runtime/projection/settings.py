"""The settings of the projector process."""

from typing import Annotated

from pydantic import Field

from controller.setting_types import Strict


class ProjectorSettings(Strict):
    """How the projector keeps the state store."""

    snapshot_every: Annotated[int, Field(gt=0)] = Field(
        5_000,
        description="most events between two kept snapshots, the first of which are closer: what a starting process folds",
    )
    admin_host: str = Field("127.0.0.1", description="where /metrics, /health and /ready are served")
    admin_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="its port; 0: any free one")
    ready_lag: Annotated[int, Field(ge=0)] = Field(
        10_000, description="events behind the journal beyond which the projector is not ready"
    )
