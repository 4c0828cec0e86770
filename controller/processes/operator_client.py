"""How a fleet is found and asked, by its operator's commands and by programs that play one."""

import asyncio
import os
import urllib.error
from pathlib import Path
from typing import Any

from controller.processes.fleet_dir import FleetDir, NoFleet
from controller.runtime.command_sender import command
from controller.runtime.history import held
from events import subjects
from events.errors import HoldfastError
from events.fact import Recorded
from events.nats.bus import NatsBus
from events.nats.urls import as_user, masked
from events.process.own_port import opened

ASK_WITHIN_S = 5.0
CONNECT_WITHIN_S = 3.0


class Unreachable(HoldfastError):
    """The fleet's broker cannot be reached."""


class OperatorRefused(HoldfastError):
    """The controller refused."""


async def http_ok(url: str, deadline_s: float = 1.0) -> bool:
    """Return whether a GET answers 200."""

    def get() -> bool:
        try:
            with opened(url, deadline_s) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    return await asyncio.to_thread(get)


def find(data: Path, user: str = "operator") -> dict[str, Any]:
    """Return how the fleet is reached by one of the broker's users: from the environment, or from the data directory. Raise
    NoFleet or BadBrokerUrl.

    `database_url` reads, `database_owner_url` makes tables.
    """
    known: dict[str, Any] = {}
    named = os.environ.get("HOLDFAST_NATS_URL", "")
    try:
        known = FleetDir(data).recall()
    except NoFleet:
        if not named:
            raise
    if named and known.get("nats_url") != named:
        known = {}  # another fleet's directory: its database is not for this journal
    for key in ("nats_url", "database_url"):
        known[key] = os.environ.get(f"HOLDFAST_{key.upper()}") or known.get(key, "")
    owner = os.environ.get("HOLDFAST_DATABASE_URL") or known.get("database_owner_url")
    known["nats_url"] = as_user(known["nats_url"], user)
    known["database_owner_url"] = (
        owner or known["database_url"]
    )  # a fleet of a release before has only the one
    return known


async def reachable(url: str) -> None:
    """Make sure that a broker answers. Raise Unreachable."""
    await (await _connect(as_user(url, "supervisor"))).close()


async def _connect(url: str) -> NatsBus:
    bus = await NatsBus.connect(url, "operator", wait_s=CONNECT_WITHIN_S)
    if bus.since is None:
        why = bus.connection.why
        await bus.close()
        raise Unreachable(f"{masked(url)}: {Unreachable.__doc__} ({why})")
    return bus


class Operator:
    """A connection to the controller's control subjects."""

    def __init__(self, bus: NatsBus, url: str) -> None:
        self._bus, self._url = bus, url

    @classmethod
    async def connect(cls, data: Path) -> "Operator":
        """Connect to the fleet of a data directory. Raise NoFleet or Unreachable."""
        url = find(data)["nats_url"]
        return cls(await _connect(url), url)

    async def ask(self, verb: str, body: dict[str, Any], deadline_s: float = ASK_WITHIN_S) -> dict[str, Any]:
        """Ask the controller for one thing, to be done within `deadline_s` seconds or never. Raise OperatorRefused with its
        reason, or what `command` raises."""
        if verb in ("status", "versions"):
            answer = dict(await self._bus.request(f"{subjects.CONTROL}.{verb}", body, deadline_s))
        else:
            answer = await command(self._bus, self._url, verb, body, deadline_s)
        if error := answer.get("error"):
            raise OperatorRefused(str(error))
        return answer

    async def act(
        self, verb: str, worker: str, argument: float | None = None, deadline_s: float = ASK_WITHIN_S
    ) -> dict[str, Any]:
        """Do one thing to one worker: drain, resume, move, or a fault of `holdfast chaos`. Raise OperatorRefused or NoAnswer."""
        body: dict[str, Any] = {"worker": worker, "by": who()}
        if verb not in ("drain", "resume", "move"):
            verb, body = "chaos", body | {"fault": verb, "argument": argument}
        return await self.ask(verb, body, deadline_s)

    async def close(self) -> None:
        """Let go of the broker."""
        await self._bus.close()


def who() -> str:
    """Return who types, for the journal."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"


async def read_all(data: Path, after: int = 0) -> list[Recorded]:
    """Return every event of the fleet's journal above sequence `after`. Raise NoFleet or JournalUnavailable."""
    from events.journal.nats import NatsJournal

    journal = await NatsJournal.connect(find(data)["nats_url"], "reader", None, make=False)
    try:
        last = await journal.last_seq()
        return [event async for batch in held(journal, after, last) for event in batch]
    finally:
        await journal.close()
