"""The settings of the projector process."""

from typing import Annotated

from pydantic import Field

from controller.setting_types import Strict


class ProjectorSettings(Strict):
    """How the projector maintains the state store."""

    snapshot_every: Annotated[int, Field(gt=0)] = Field(
        5_000,
        description="maximum events between two kept snapshots, which bounds what a starting process folds; the first snapshots "
        "are closer",
    )
    admin_host: str = Field("127.0.0.1", description="address of /metrics, /health and /ready")
    admin_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="port on admin_host; 0: any")
    ready_lag: Annotated[int, Field(ge=0)] = Field(
        10_000, description="lag in events behind the journal beyond which the projector is not ready"
    )
