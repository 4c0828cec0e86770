"""Operator actions of the console: drain, resume, move and restart, as the `holdfast` commands do."""

from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from events.errors import HoldfastError

VERBS = ("drain", "resume", "move", "restart")
READ_ONLY = (
    "this console is read-only: start the fleet with `holdfast up --console-actions` (for a separate frontend: "
    "`--console-actions`, or HOLDFAST_FRONTEND__CONSOLE_ACTIONS=true), or use `holdfast drain` and the other commands"
)


class ActionUnclear(HoldfastError):
    """The request does not describe an action of the console."""


class WorkerAct(Protocol):
    """Carries out an operator's command on a worker."""

    async def __call__(self, verb: str, body: dict[str, Any]) -> str:
        """Run the action and return a sentence about the result. Raise HoldfastError with the reason if it failed."""
        ...


class Action(BaseModel):
    """The action that the page requests."""

    model_config = ConfigDict(extra="forbid", strict=True)

    verb: Literal["drain", "resume", "move", "restart"]
    worker: str = Field(min_length=1, max_length=200)
    deadline_s: float | None = Field(default=None, gt=0, le=86_400)  # only for drain
    to: str = Field(default="", max_length=200)  # only for move

    def body(self, by: str) -> dict[str, Any]:
        """Return the command's body for the controller."""
        more: dict[str, Any] = {}
        if self.verb == "drain":
            more["deadline_s"] = self.deadline_s
        elif self.verb == "move":
            more["to"] = self.to
        return {"worker": self.worker, "by": by, **more}


def parse_action(body: bytes) -> Action:
    """Parse a request body. Raise ActionUnclear."""
    try:
        return Action.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        expected = f'{{"verb": "{" | ".join(VERBS)}", "worker": NAME}}'
        raise ActionUnclear(f"{where}: {first['msg']}; expected {expected}") from None
