"""Checks an operator's request about goldens, and records it as a fact on the journal.

The module `controller.deciders.golden` decides what the fact changes.
"""

from controller.deciders.fleet import Fleet, Worker
from controller.deciders.golden import Golden, last_answer
from controller.deciders.votes import Vote, agrees
from controller.ports import NO_COMMAND, Command, GoldenWish
from controller.runtime.command_answers import NotPossible, UnknownWorker
from events.journal.port import Journal
from events.observations import GoldenRequested

FLUSH_S = 1.0
NAMED_MAX = 5  # canaries or keys that an error lists


async def request_goldens(
    fleet: Fleet, journal: Journal, wish: GoldenWish, by: str, command: Command = NO_COMMAND
) -> GoldenRequested:
    """Validate a request against the fleet, record it on the journal, and return its fact.

    Raise UnknownWorker if the named worker does not exist. Raise NotPossible if this worker is dead, if the request would change
    nothing, or if the kind GoldenRequested is not in force.
    """
    worker = _worker(fleet, wish.worker) if wish.worker else None
    key = _key(fleet, wish, worker)
    fact = GoldenRequested(
        act=wish.act,
        canary_key=key,
        canaries=() if wish.answers else _canaries(fleet, key, wish, worker),
        answers=wish.answers,
        worker=wish.worker,
        instance=worker.joined.instance if worker is not None else "",
        by=by,
        command=command.id,
        until=command.deadline,
    )
    journal.observe(fact)
    await journal.flush(FLUSH_S)
    if journal.withheld(command.id):
        raise NotPossible(
            f"{fact.kind()} is not in force: a process of an older release is running. `holdfast fleet versions` lists it"
        )
    return fact


def _worker(fleet: Fleet, name: str) -> Worker:
    worker = fleet.workers.get(name)
    if worker is None:
        raise UnknownWorker(f"{name!r}: {UnknownWorker.__doc__}")
    if not worker.alive:
        raise NotPossible(f"{name} is dead ({worker.health.reason}): it cannot answer")
    return worker


def _key(fleet: Fleet, wish: GoldenWish, worker: Worker | None) -> str:
    """Return the canary key that the request selects. Raise NotPossible if it selects no key, or several."""
    if worker is not None:
        return worker.joined.canary_key
    if wish.canary_key:
        return wish.canary_key
    wanted = (key for key, state in fleet.goldens.items() if _changes(state, wish))
    keys = sorted({key for key, id in wanted if _is_of(key, wish.model) and id in (wish.canaries or (id,))})
    if len(keys) == 1:
        return keys[0]
    if not keys:
        _named(fleet, wish)
        raise NotPossible(f"model {wish.model!r} has {_lacking(wish)}; `holdfast golden list` lists all")
    shown = ", ".join(map(repr, keys[:NAMED_MAX]))
    raise NotPossible(
        f"model {wish.model!r} has goldens under {len(keys)} canary keys: select one with --key: {shown}"
    )


def _named(fleet: Fleet, wish: GoldenWish) -> None:
    """Raise NotPossible if the request names a canary without a golden, although the model has goldens."""
    known = sorted({canary for key, canary in fleet.goldens if _is_of(key, wish.model)})
    for canary in wish.canaries if known else ():
        if canary not in known:
            names = ", ".join(known[:NAMED_MAX])
            raise NotPossible(f"model {wish.model!r} has no golden of canary {canary!r}; it has: {names}")


def _canaries(fleet: Fleet, key: str, wish: GoldenWish, worker: Worker | None) -> tuple[str, ...]:
    """Return the canary ids of the goldens that the request changes.

    Raise NotPossible if the request changes no golden, or names a canary that has no golden to change.
    """
    known = {canary: state for (of, canary), state in fleet.goldens.items() if of == key}
    found = tuple(canary for canary in sorted(known) if _changes(known[canary], wish, worker))
    for canary in wish.canaries:
        if canary not in known:
            names = ", ".join(sorted(known)[:NAMED_MAX]) or "none"
            raise NotPossible(f"there is no golden of canary {canary!r} under {key!r}; there are: {names}")
        if canary not in found:
            raise NotPossible(f"the golden of {canary} is {known[canary].status}: there is {_lacking(wish)}")
    if not found:
        raise NotPossible(f"there is {_lacking(wish)} under {key!r}; `holdfast golden list` lists all")
    return wish.canaries or found


def _changes(state: Golden, wish: GoldenWish, worker: Worker | None = None) -> bool:
    """Return whether a request can change this golden. `worker` is the worker named by the request, or None."""
    if wish.act == "record":
        return True
    if wish.act == "retire":
        return state.status != "retired"
    if worker is None:
        return state.status == "provisional"
    answer = last_answer(state, worker.joined.worker, worker.joined.instance)
    if answer is None or state.status != "agreed":
        return answer is not None
    return not agrees(Vote("", "", state.tokens, state.top_k), answer, state.tolerance)


def _lacking(wish: GoldenWish) -> str:
    """Return a phrase for an error message that names the missing goldens or answers, such as "no provisional golden"."""
    match wish.act:
        case "approve" if wish.worker:
            return f"no whole answer of {wish.worker} that is not agreed"
        case "approve":
            return "no provisional golden"
        case "retire":
            return "no golden in use"
        case _:
            return "no golden"


def _is_of(key: str, model: str) -> bool:
    return key.partition("|")[0] == model
