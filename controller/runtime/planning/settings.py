"""The settings of the planner process."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from controller.planner.plan import PlannerPolicy
from controller.setting_types import NotNegative, Positive, Strict


class PlannerSettings(Strict):
    """What the planner may do, and with how much caution."""

    mode: Literal["observe", "propose", "act"] = Field(
        "propose",
        description="observe: report what models can carry; propose: also how many workers they should have; act: also apply "
        "the proposals",
    )
    every_s: Positive = Field(5.0, description="seconds between two readings of the state store")
    lost_after_s: NotNegative = Field(
        120.0, description="seconds without service after which a worker counts as lost and is replaced"
    )
    repeat_s: NotNegative = Field(
        600.0, description="seconds until a proposal that was not applied is repeated"
    )
    policy: PlannerPolicy = PlannerPolicy()
    hook_command: str = Field(
        "",
        description="act: the command that scales, JSON on its standard input; split as a shell would, but no shell runs it",
    )
    hook_url: str = Field(
        "", description="act: URL of the scale subresource to call; {model} stands for the model's name"
    )
    hook_token_file: str = Field("", description="file with the bearer token for hook_url, read at each call")
    hook_ca_file: str = Field("", description="file with the CA certificates for hook_url's server")
    hook_timeout_s: Positive = Field(30.0, description="seconds that a hook call may take")
    admin_host: str = Field("127.0.0.1", description="address of /metrics, /health, /ready and /plan")
    admin_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="port on admin_host; 0: any")

    @model_validator(mode="after")
    def _one_hook(self) -> Self:
        if self.hook_command and self.hook_url:
            raise ValueError("hook_command and hook_url are both set: only one of them can scale a model")
        return self

    @property
    def by(self) -> str:
        """What applies proposals; empty: nothing does."""
        if self.mode != "act":
            return ""
        return "command" if self.hook_command else "http" if self.hook_url else "supervisor"
