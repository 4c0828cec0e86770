"""A console over a made history, served on its own port."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from fleet_history import History

from controller.adapters.clock import SystemClock
from controller.console.console import Console, ConsoleSources
from controller.console.history import HistoryReader
from controller.console.memory import EndedIncident
from controller.console.rows import Changes, Sections
from events.errors import HoldfastError
from events.fact import Recorded


@dataclass
class ConsoleKit:
    """One console with its inputs and the actions that it requested."""

    history: History
    console: Console
    http: aiohttp.ClientSession
    url: str = ""
    streams: dict[str, int] = field(default_factory=dict)
    fault: str = ""
    running: dict[str, list[str]] = field(default_factory=dict)
    done: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    passed: int = 0

    def pass_on(self) -> None:
        """Pass the events since the last call to the console."""
        batch = self.history.events[self.passed :]
        self.passed = len(self.history.events)
        self.console.absorb(self.history.fleet, batch)


class Refused(HoldfastError):
    """The fake controller refuses the action."""


def reader(*command: str, **more: Any) -> HistoryReader:
    """Return a reader that runs a command instead of `holdfast`."""
    return HistoryReader(command or ("false",), (), {}, **more)


@asynccontextmanager
async def console(
    history: History,
    *,
    acts: bool = False,
    command: Sequence[str] = (),
    earlier: Sequence[Recorded] = (),
    ended: Sequence[EndedIncident] = (),
) -> AsyncIterator[ConsoleKit]:
    """Serve the console of a history."""

    async def act(verb: str, body: dict[str, Any]) -> str:
        if body["worker"] == "w9":
            raise Refused("there is no worker w9")
        kit.done.append((verb, body))
        return f"{body['worker']}: {verb}"

    async def before(until: int) -> Sequence[Recorded]:
        return earlier

    async def over() -> Sequence[EndedIncident]:
        return ended

    sources = ConsoleSources(
        "frontend-0", frozenset({"gpu-host"}), lambda: history.fleet, lambda: history.latest.last_seq,
        lambda: kit.streams, lambda: kit.fault, lambda id: kit.running.get(id, []), before, over,
    )  # fmt: skip
    made = Console(sources, SystemClock(), reader(*command), act if acts else None)

    async def other(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="the other handler")

    runner = web.ServerRunner(web.Server(made.before(other), handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    running = asyncio.create_task(made.run())
    async with aiohttp.ClientSession() as http:
        kit = ConsoleKit(history, made, http, f"http://127.0.0.1:{runner.addresses[0][1]}")
        kit.pass_on()
        try:
            yield kit
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await runner.cleanup()


def applied(before: Sections, new: Changes) -> Sections:
    """Return the sections that result from applying changes to `before`, in the same way as console.js does."""
    found = {section: dict(rows) for section, rows in before.items()}
    for section, rows in new.items():
        for key, row in rows.items():
            if row is None:
                found[section].pop(key, None)
            else:
                found[section][key] = row
    return found
