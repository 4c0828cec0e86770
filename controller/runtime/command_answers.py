"""The answers to an operator's commands: errors, and sentences derived from the fact of a command.

The fact of a command is the event that records the command's effect. Because the answer follows from the fact, any later
reader of the journal gives the same answer as the controller that carried out the command.
"""

from events.decisions import PolicyAdopted
from events.errors import HoldfastError
from events.observations import (
    ChaosInjected,
    Commanded,
    DrainRequested,
    GoldenRequested,
    MoveRequested,
    RestartRequested,
    ResumeRequested,
)


class UnknownWorker(HoldfastError):
    """There is no worker of that name; `holdfast status` lists the workers."""


class NotPossible(HoldfastError):
    """The command cannot be applied to this worker now."""


class Unanswered(NotPossible):
    """The worker does not answer."""


class ChaosRefused(HoldfastError):
    """Fault injection is off: this fleet was not started with --chaos."""


VERBS: dict[type[Commanded], str] = {
    DrainRequested: "drain",
    ResumeRequested: "resume",
    MoveRequested: "move",
    RestartRequested: "restart",
    ChaosInjected: "chaos",
    GoldenRequested: "golden",
}


def allowed(fact: PolicyAdopted) -> str:
    """Return the answer to `holdfast fleet allow`: which deciders version and how many new fact kinds are in force."""
    kinds = len(fact.kinds or ())
    return f"deciders version {fact.deciders_version} and {kinds} new kinds are in force"


def done(fact: Commanded) -> str:
    """Return a sentence that states the effect of a command. Raise AssertionError for a fact that no command produces."""
    match fact:
        case DrainRequested(worker=worker, deadline_s=deadline_s):
            return f"{worker} will drain" + ("" if deadline_s is None else f" within {deadline_s:g} s")
        case ResumeRequested(worker=worker):
            return f"{worker} will return to service after its next good canary"
        case MoveRequested(worker=worker, to=to):
            return f"requests on {worker} will move" + (f" to {to}" if to else "")
        case RestartRequested(worker=worker):
            return f"{worker} shuts down; its supervisor starts it again"
        case GoldenRequested():
            return golden(fact)
        case ChaosInjected(worker=worker, fault=fault, detail=detail):
            return f"{worker}: {fault}" + (f" ({detail})" if detail else "")
        case _:
            raise AssertionError(f"{fact.kind()} follows from no command")


def golden(fact: GoldenRequested) -> str:
    """Return a sentence that states what was requested about goldens. The leading controller decides on the request later."""
    names = ", ".join(fact.canaries or (answer.canary for answer in fact.answers))
    match fact.act:
        case "approve" if fact.worker:
            return f"requested: the answers of {fact.worker} to {names} become the agreed goldens"
        case "approve":
            return f"requested: the goldens of {names} become agreed"
        case "retire":
            return f"requested: the goldens of {names} are retired, and the next answers are voted on"
        case _:
            return f"requested: the goldens of {names} are retired, and recorded with {fact.worker}"
