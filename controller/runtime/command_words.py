"""What is an operator told of a command that was carried out? The same by who did it, and by who reads of it later."""

from events.decisions import PolicyAdopted
from events.observations import (
    ChaosInjected,
    Commanded,
    DrainRequested,
    GoldenRequested,
    MoveRequested,
    RestartRequested,
    ResumeRequested,
)

VERBS: dict[type[Commanded], str] = {
    DrainRequested: "drain",
    ResumeRequested: "resume",
    MoveRequested: "move",
    RestartRequested: "restart",
    ChaosInjected: "chaos",
    GoldenRequested: "golden",
}


def verb(fact: Commanded) -> str:
    """Return the verb of the command that led to a fact."""
    return VERBS[type(fact)]


def allowed(fact: PolicyAdopted) -> str:
    """Return what `holdfast fleet allow` did."""
    kinds = len(fact.kinds or ())
    return f"deciders version {fact.deciders_version} and {kinds} new kinds are in force"


def done(fact: Commanded) -> str:
    """Return what was done, in one sentence. Raise AssertionError of a fact that no command leads to."""
    match fact:
        case DrainRequested(worker=worker, deadline_s=deadline_s):
            return f"{worker} is to drain" + ("" if deadline_s is None else f" within {deadline_s:g} s")
        case ResumeRequested(worker=worker):
            return f"{worker} is to come back, after its next good canary"
        case MoveRequested(worker=worker, to=to):
            return f"what runs on {worker} is to move" + (f" to {to}" if to else "")
        case RestartRequested(worker=worker):
            return f"{worker} shuts down; its supervisor starts it again"
        case GoldenRequested():
            return golden(fact)
        case ChaosInjected(worker=worker, fault=fault, detail=detail):
            return f"{worker}: {fault}" + (f" ({detail})" if detail else "")
        case _:
            raise AssertionError(f"{fact.kind()} follows from no command")


def golden(fact: GoldenRequested) -> str:
    """Return what was requested about goldens: a decision of the leading controller answers it."""
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
