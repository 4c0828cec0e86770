"""Finds a fleet by its data directory and sends operator commands to its controller."""

import asyncio
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from controller.processes.fleet_dir import FleetDir, NoFleet
from controller.runtime.bounded_read import held
from controller.runtime.command_sender import command
from events import subjects
from events.errors import HoldfastError
from events.fact import Recorded
from events.json_types import Json
from events.nats.bus import NatsBus
from events.nats.urls import as_user, masked

ASK_WITHIN_S = 5.0
CONNECT_WITHIN_S = 3.0


class Unreachable(HoldfastError):
    """The fleet's broker cannot be reached."""


class OperatorRefused(HoldfastError):
    """The controller refused the command."""


async def http_ok(url: str, deadline_s: float = 1.0) -> bool:
    """Return whether a GET of this URL answers with status 200 within `deadline_s` seconds."""

    def get() -> bool:
        try:
            with opened(url, deadline_s) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    return await asyncio.to_thread(get)


def find(data: Path, user: str = "operator") -> Json:
    """Return the URLs of a fleet's broker and database, by name, from the environment or the data directory.

    The broker's URL, `nats_url`, is for the broker account `user`. `database_url` has read access, and `database_owner_url` may
    create tables. Raise NoFleet if no fleet runs on `data` and the environment names no broker, and BadBrokerUrl if the broker's
    URL is invalid.
    """
    known: Json = {}
    named = os.environ.get("HOLDFAST_NATS_URL", "")
    try:
        known = FleetDir(data).recall()
    except NoFleet:
        if not named:
            raise
    if named and known.get("nats_url") != named:
        known = {}  # the directory is that of another fleet, and its database belongs to another journal
    for key in ("nats_url", "database_url"):
        known[key] = os.environ.get(f"HOLDFAST_{key.upper()}") or known.get(key, "")
    owner = os.environ.get("HOLDFAST_DATABASE_URL") or known.get("database_owner_url")
    known["nats_url"] = as_user(known["nats_url"], user)
    # a fleet of an older release has only one URL
    known["database_owner_url"] = owner or known["database_url"]
    return known


async def reachable(url: str) -> None:
    """Check that the broker at `url` answers. Raise Unreachable if it does not."""
    await (await _connect(as_user(url, "supervisor"))).close()


async def _connect(url: str) -> NatsBus:
    bus = await NatsBus.connect(url, "operator", wait_s=CONNECT_WITHIN_S)
    if bus.since is None:
        why = bus.connection.why
        await bus.close()
        raise Unreachable(f"{masked(url)}: {Unreachable.__doc__} ({why})")
    return bus


class Operator:
    """Sends operator commands to the controller of a fleet over one broker connection."""

    def __init__(self, bus: NatsBus, url: str) -> None:
        self._bus, self._url = bus, url

    @classmethod
    async def connect(cls, data: Path) -> "Operator":
        """Connect to the broker of the fleet with this data directory.

        Raise NoFleet if no fleet is found, and Unreachable if its broker does not answer.
        """
        url = find(data)["nats_url"]
        return cls(await _connect(url), url)

    async def ask(self, verb: str, body: Json, deadline_s: float = ASK_WITHIN_S) -> Json:
        """Send a request to the controller and return its answer.

        The controller carries out the request within `deadline_s` seconds or not at all. Raise OperatorRefused with the
        controller's reason, or the errors of `controller.runtime.command_sender.command`.
        """
        if verb in ("status", "versions"):
            answer = dict(await self._bus.request(f"{subjects.CONTROL}.{verb}", body, deadline_s))
        else:
            answer = await command(self._bus, self._url, verb, body, deadline_s)
        if error := answer.get("error"):
            raise OperatorRefused(str(error))
        return answer

    async def act(
        self, verb: str, worker: str, argument: float | None = None, deadline_s: float = ASK_WITHIN_S
    ) -> Json:
        """Send one command for a worker, and return the controller's answer.

        `verb` is drain, resume, move or a fault of `holdfast chaos`, and `argument` is the fault's argument. Raise
        OperatorRefused if the controller refuses the command, NoAnswer if no answer arrives in time.
        """
        body: Json = {"worker": worker, "by": operator_name()}
        if verb not in ("drain", "resume", "move"):
            verb, body = "chaos", body | {"fault": verb, "argument": argument}
        return await self.ask(verb, body, deadline_s)

    async def close(self) -> None:
        """Close the connection to the broker."""
        await self._bus.close()


class Closable(Protocol):
    """A connection that can be closed."""

    async def close(self) -> None:
        """Close the connection."""


C = TypeVar("C", bound=Closable)


@asynccontextmanager
async def closing(opening: Awaitable[C]) -> AsyncIterator[C]:
    """Yield the connection that `opening` opens, and close it at the end."""
    connection = await opening
    try:
        yield connection
    finally:
        await connection.close()


async def ask(data: Path, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Connect to the fleet of a data directory, send one request to its controller and return the answer.

    Raise NoFleet, Unreachable, or what `Operator.ask` raises.
    """
    async with closing(Operator.connect(data)) as operator:
        return await operator.ask(verb, body or {})


def operator_name() -> str:
    """Return the name of the current user, which the journal records as the operator."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"


async def read_all(data: Path, after: int = 0) -> list[Recorded]:
    """Return every event of the fleet's journal with a sequence above `after`.

    Raise NoFleet if no fleet runs, JournalUnavailable if the journal cannot be read.
    """
    from events.journal.nats import NatsJournal

    async with closing(NatsJournal.connect(find(data)["nats_url"], "reader", make=False)) as journal:
        last = await journal.last_seq()
        return [event async for batch in held(journal, after, last) for event in batch]


def opened(request: "str | urllib.request.Request", within_s: float) -> Any:
    """Open a URL of a process on this host, without a proxy.

    The certificate is not verified, because it is issued for the host name that clients use, and not for this address.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers).open(request, timeout=within_s)
