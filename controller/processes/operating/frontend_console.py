"""Connects a frontend's console to fleet state, events, worker connections and operator commands."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from controller.adapters.clock import SystemClock
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.console.console import Console, ConsoleSources
from controller.console.history import HistoryReader
from controller.console.memory import ENDED_MAX, EndedIncident
from controller.frontend.director import Director
from controller.processes.operator_client import ask
from controller.replay.recent import TOLD_MAX
from controller.replay.sentences import count
from controller.runtime.bounded_read import held
from controller.runtime.view import FleetView
from events.fact import Recorded
from events.journal.port import Journal
from events.json_types import Json, JsonView
from events.nats.bus import Bus
from events.process.admin_guard import own_hosts

EARLIER_EVENTS = 4 * TOLD_MAX  # reads more events than are shown, because most events are routine
ReadEnded = Callable[[int], Awaitable[Sequence[JsonView]]]
"""Reads the rows of the incidents that ended last, at most as many as requested."""


def make(
    name: str,
    view: FleetView,
    journal: Journal,
    bus: Bus,
    plane: RequestPlaneClient,
    director: Director,
    history: HistoryReader,
    ended: ReadEnded | None,
    acts_in: Path | None,
) -> Console:
    """Create a frontend's console. The console shows the state of `view`, the frontend's view of the fleet.

    `ended` reads ended incidents from the state store, or is None without a store. `acts_in` is the fleet's data directory if the
    console may send operator commands, else None.
    """
    sources = ConsoleSources(
        name=name,
        names=own_hosts(),
        fleet=lambda: view.fleet,
        seq=lambda: view.seq,
        streams=lambda: {worker: _streams(plane, worker) for worker in plane.welcomes},
        fault=lambda: _fault(view, bus),
        running=partial(_running, director),
        earlier=partial(_earlier, journal),
        ended=partial(_ended, ended),
    )
    act = None if acts_in is None else partial(_act, acts_in)
    console = Console(sources, SystemClock(), history, act)
    view.listen(lambda view, batch: console.absorb(view.fleet, batch))
    return console


def history_reader(data: Path, nats_url: str, database_url: str | None) -> HistoryReader:
    """Return a reader that runs `holdfast` as a child process. The child connects to the journal and the state store itself."""
    command, options = [sys.executable, "-m", "controller.cli"], ["--data", str(data)]
    where = {"HOLDFAST_NATS_URL": nats_url, "HOLDFAST_DATABASE_URL": database_url or ""}
    return HistoryReader(command, options, where)


def _streams(plane: RequestPlaneClient, worker: str) -> int:
    """Return the number of streams that a worker runs or queues for all frontends, without canaries."""
    return sum(load.running + load.waiting - load.canaries for load in plane.load_by_rank(worker))


def _running(director: Director, request: str) -> Sequence[str]:
    """Return one line for each worker that currently generates an answer to this request for this frontend."""
    endpoints, at = director.table.endpoints, director.running.at
    return [
        f"is answered now, by {endpoint.worker}: {count(len(one.accepted), 'token')} so far"
        for endpoint in endpoints.values()
        for one in at(endpoint)
        if one.request.id == request
    ]


def _fault(view: FleetView, bus: Bus) -> str:
    if view.fault is not None:
        return str(view.fault)
    return "" if bus.since is not None else "the broker cannot be reached"


async def _earlier(journal: Journal, until: int) -> Sequence[Recorded]:
    """Return the last EARLIER_EVENTS events up to the sequence `until`, except those that the journal has dropped.

    Raise JournalUnavailable if the journal cannot be read.
    """
    after = max(0, until - EARLIER_EVENTS)
    return [event async for batch in held(journal, after, until) for event in batch]


async def _ended(read: ReadEnded | None) -> Sequence[EndedIncident]:
    """Return the incidents that ended last, from the state store; empty without a store.

    Raise StoreUnavailable if the store cannot be reached.
    """
    return [_incident(row) for row in await read(ENDED_MAX)] if read is not None else ()


def _incident(row: JsonView) -> EndedIncident:
    at, outcome = row["closed_at"], row["outcome"] or ""
    return EndedIncident(row["incident"], row["subject"], row["symptom"], row["opened_at"], at, outcome)


async def _act(data: Path, verb: str, body: Json) -> str:
    """Run one operator command and return its result as text. Raise HoldfastError with the reason if the command failed."""
    answer = await ask(data, verb, body)
    return str(answer.get("says", f"{verb} {body['worker']}: done"))
