"""Follows a fleet's start and reports every ten seconds which workers are missing, and why.

A fleet is ready once its first worker serves requests and its controller and projector work. The reports end when the fleet
serves requests, unless workers may wait for something outside of the fleet. After the timeout of the start, missing workers are
reported only when they or their reasons change.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

from controller.deciders.worker import SPARE
from controller.processes.console import print_line, warn
from controller.processes.operator_client import Operator, closing
from events.errors import HoldfastError
from events.json_types import JsonView

ASK_S = 1.0
UNASKED = "the controller does not answer yet"

Ask = Callable[[], Awaitable[JsonView | None]]
"""Returns a fleet's status; None if no controller answers."""


def status_reader(data: Path) -> Ask:
    """Return a function that reads the status from the controller of the fleet with this data directory."""

    async def ask() -> JsonView | None:
        with contextlib.suppress(HoldfastError):
            async with closing(Operator.connect(data)) as operator:
                return await operator.ask("status", {}, ASK_S)
        return None

    return ask


class ReadinessWatch:
    """Follows the start of one fleet for its supervisor, and prints the missing workers."""

    say_every_s = 10.0  # interval of reports about missing workers
    status_s = 10.0  # a serving fleet is ready after this time, even if its controller does not answer

    def __init__(
        self, ask: Ask, names: Sequence[str], timeout_s: float, *, patient: bool, spares: Sequence[str] = ()
    ) -> None:
        """Follow the start of the workers `names` and `spares`. The start may take `timeout_s` seconds.

        `ask` reads the fleet's status; it returns None if the controller does not answer. `patient` states that workers may
        wait for something outside of the fleet (a server, a model). If `patient` is true, the reports continue after the
        fleet has begun to serve requests.
        """
        self.timeout_s = timeout_s
        self._ask = ask
        self._names = [*names, *spares]
        self._spares = len(spares)
        self.kept: frozenset[str] = frozenset()  # workers that are spares according to the last status
        self._patient = patient
        self._until = time.monotonic() + timeout_s
        self._serving_since: float | None = None
        self._complete = False  # whether all workers have been ready at the same time once
        self._missing: dict[str, str] = {}
        self._reported: list[str] = []
        self._undecided = ""  # why no process can fold the journal; empty: not known to be so
        self._reporting: asyncio.Task[None] | None = None

    @property
    def late(self) -> bool:
        """Whether the start takes longer than its timeout."""
        return time.monotonic() > self._until

    def wait_for_decision(self, why: str) -> None:
        """Restart the timeout, because the start waits for an operator, and print the reason once."""
        self._until = time.monotonic() + self.timeout_s
        if why != self._undecided:
            self._undecided = why
            warn(f"the start waits for your decision: {why}")

    @property
    def there(self) -> str:
        """How many workers are ready, as text."""
        total, missing = len(self._names), len(self._missing)
        counted = f"{total - missing} of {total}" if missing else f"{total}"
        spares = f", {self._spares} of them spare" if self._spares else ""
        return f"{counted} worker{'s' if total != 1 else ''}{spares}"

    def begin(self) -> None:
        """Start to report missing workers in the background."""
        self._reporting = asyncio.create_task(self._report_periodically(), name="readiness")

    def check(self) -> None:
        """Raise the error that ended the background reporting. Do nothing if the reporting still runs."""
        if self._reporting is not None and self._reporting.done():
            self._reporting.result()

    async def end(self) -> None:
        """Stop the reporting."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.wait({self._reporting})

    async def serves(self) -> bool:
        """Record that the fleet serves requests. Return whether the fleet is ready.

        The fleet is ready once its controller answers with the position of a projector, which shows that both processes work.
        After `status_s` seconds of service, the fleet counts as ready without this answer.
        """
        now = time.monotonic()
        self._serving_since = self._serving_since or now
        status = await self._ask()
        if status is not None:
            self._update(status)
            self._reported = list(lines(self._missing))
            if status["projector"]["position"] is not None:
                return True
        return now - self._serving_since > self.status_s

    async def verdict(self) -> str:
        """Return a text about the missing workers of a fleet that did not become ready in time."""
        await self.look()
        return "; ".join(lines(self._missing)) or "a worker is ready, but no frontend reaches it"

    async def look(self) -> None:
        """Update the missing workers from the fleet's status.

        If the controller does not answer, keep the last result. Without a last result, all workers count as missing.
        """
        status = await self._ask()
        if status is not None:
            self._update(status)
        elif not self._missing:
            self._missing = dict.fromkeys(self._names, UNASKED)

    def report(self) -> None:
        """Print the missing workers; after the timeout of the start, only if they or their reasons have changed.

        When no worker is missing any more, print that once.
        """
        before, self._reported = self._reported, list(lines(self._missing))
        if self._reported != before or not self.late:
            for line in self._reported:
                print_line(line)
        if before and not self._reported:
            print_line(f"no longer waiting for any worker: {self.there}")

    def _update(self, status: JsonView) -> None:
        outside = self._complete or self.late or (not self._patient and self._serving_since is not None)
        self._missing = absent(self._names, status, outside=outside)
        self.kept = frozenset(worker["id"] for worker in status["workers"] if worker.get("spare"))
        self._complete = self._complete or not self._missing

    async def _report_periodically(self) -> None:
        while True:
            await asyncio.sleep(self.say_every_s)
            if self._patient or self._serving_since is None:
                await self.look()
                self.report()


NAMED_MAX = 3  # workers named per line; the others with the same reason are counted


def absent(names: Sequence[str], status: JsonView, *, outside: bool) -> dict[str, str]:
    """Return the missing workers among `names`, each with the reason.

    A worker is missing unless it serves requests or is a ready spare. If `outside` is true, return only workers that wait for
    something outside of the fleet, because the fleet handles all other causes itself.
    """
    known = {worker["id"]: worker for worker in status["workers"]}
    waiting = {one["id"]: str(one["reason"]) for one in status.get("awaited", ())}
    found: dict[str, str] = {}
    for name in names:
        if name in waiting:
            found[name] = waiting[name]
        elif not outside and (why := _why_not(known.get(name))):
            found[name] = why
    return found


def _why_not(worker: JsonView | None) -> str:
    """Return why a worker does not serve requests; empty if the worker serves requests or is a ready spare."""
    if worker is None:
        return "its process has not reported yet"
    why = [reason for reason in worker.get("reasons") or () if reason != SPARE]
    if worker["weight"] or (worker.get("spare") and not why):
        return ""
    return "; ".join(why) or "it serves no requests yet"


def lines(missing: Mapping[str, str]) -> Iterator[str]:
    """Yield one line per reason, with the workers to which the reason applies."""
    alike: dict[str, list[str]] = {}
    for name, why in missing.items():
        alike.setdefault(why, []).append(name)
    for why, names in alike.items():
        named = ", ".join(names[:NAMED_MAX])
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        yield f"waiting for {named}{more}: {why}"
