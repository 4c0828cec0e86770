"""What may be done from the console: what `holdfast drain`, `resume`, `move` and `restart` do, by the same way."""

from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from events.errors import HoldfastError

VERBS = ("drain", "resume", "move", "restart")
READ_ONLY = (
    "this console shows, and does nothing: start the fleet with `holdfast up --console-actions` (of a frontend alone: "
    "`--console-actions`, or HOLDFAST_FRONTEND__CONSOLE_ACTIONS=true), or use `holdfast drain` and its like"
)


class ActionUnclear(HoldfastError):
    """What is asked for is nothing that the console can do."""


class WorkerAct(Protocol):
    """Does something to a worker, as an operator's command would."""

    async def __call__(self, verb: str, body: dict[str, Any]) -> str:
        """Return what was done. Raise HoldfastError with why it was not."""
        ...


class Action(BaseModel):
    """What the page sends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    verb: Literal["drain", "resume", "move", "restart"]
    worker: str = Field(min_length=1, max_length=200)
    deadline_s: float | None = Field(default=None, gt=0, le=86_400)  # of a drain
    to: str = Field(default="", max_length=200)  # of a move

    def body(self, by: str) -> dict[str, Any]:
        """Return it as the controllers take it."""
        more: dict[str, Any] = {}
        if self.verb == "drain":
            more["deadline_s"] = self.deadline_s
        elif self.verb == "move":
            more["to"] = self.to
        return {"worker": self.worker, "by": by, **more}


def understood(body: bytes) -> Action:
    """Return what is to be done. Raise ActionUnclear."""
    try:
        return Action.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        wants = f'{{"verb": "{" | ".join(VERBS)}", "worker": NAME}}'
        raise ActionUnclear(f"{where}: {first['msg']}; {wants} is wanted") from None
