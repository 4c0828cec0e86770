"""Who looks after a fleet's start: says every ten seconds who is awaited and why, and what to say when it took too long.

What a reader would get wrong: a fleet is ready with the first worker that takes requests, and awaits the others all the same.
Who does not come within the time that its start may take is then said again whenever the reason changes, not for ever.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.processes.console import say, warn
from controller.processes.operator_client import Operator
from controller.processes.readiness.absent import absent, lines
from events.errors import HoldfastError

ASK_S = 1.0
UNASKED = "the controller cannot be asked yet"

Ask = Callable[[], Awaitable[Mapping[str, Any] | None]]
"""Returns a fleet's status; None if nobody can be asked."""


def asking(data: Path) -> Ask:
    """Return what asks the controller of a data directory's fleet."""

    async def ask() -> Mapping[str, Any] | None:
        with contextlib.suppress(HoldfastError):
            operator = await Operator.connect(data)
            try:
                return await operator.ask("status", {}, ASK_S)
            finally:
                await operator.close()
        return None

    return ask


@dataclass(frozen=True, slots=True)
class ReadinessTimes:
    """How often it is said who is awaited, and how long an answer is waited for, in seconds."""

    say_every_s: float = 10.0
    status_s: float = (
        10.0  # a fleet that serves is ready after this, whether or not its controller can be asked
    )


class ReadinessWatch:
    """One fleet's start, as its supervisor follows it."""

    def __init__(
        self,
        ask: Ask,
        names: Sequence[str],
        timeout_s: float,
        *,
        patient: bool,
        spares: Sequence[str] = (),
        times: ReadinessTimes = ReadinessTimes(),
    ) -> None:
        """Follow the start of these workers and `spares`, which may take `timeout_s`. `patient`: they wait for something outside
        of the fleet, and go on being looked at when it serves."""
        self.timeout_s = timeout_s
        self._ask = ask
        self._names = [*names, *spares]
        self._spares = len(spares)
        self.kept: frozenset[str] = frozenset()  # workers that are spares, as the fleet said last
        self._patient = patient
        self._times = times
        self._until = time.monotonic() + timeout_s
        self._serving_since: float | None = None
        self._complete = False  # all of them were there once
        self._missing: dict[str, str] = {}
        self._said: list[str] = []
        self._undecided = ""  # why nobody can fold the journal
        self._telling: asyncio.Task[None] | None = None

    @property
    def late(self) -> bool:
        """Whether the time is over that the start may take."""
        return time.monotonic() > self._until

    def wait_for_decision(self, why: str) -> None:
        """Give the start all of its time again: it waits for an operator, who is told once why."""
        self._until = time.monotonic() + self.timeout_s
        if why != self._undecided:
            self._undecided = why
            warn(f"nothing goes on before you have decided: {why}")

    @property
    def there(self) -> str:
        """How many workers are there, as one says it."""
        total, missing = len(self._names), len(self._missing)
        counted = f"{total - missing} of {total}" if missing else f"{total}"
        spares = f", {self._spares} of them spare" if self._spares else ""
        return f"{counted} worker{'s' if total != 1 else ''}{spares}"

    def begin(self) -> None:
        """Tell from now on who is awaited."""
        self._telling = asyncio.create_task(self._tell_for_ever(), name="readiness")

    def check(self) -> None:
        """Raise what has ended the telling, if anything has."""
        if self._telling is not None and self._telling.done():
            self._telling.result()

    async def end(self) -> None:
        """Tell no more."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})

    async def serves(self) -> bool:
        """Take in that requests are served. Return whether the fleet is ready: an operator's commands are answered, too."""
        now = time.monotonic()
        self._serving_since = self._serving_since or now
        status = await self._ask()
        if status is not None:
            self._take(status)
            self._said = list(lines(self._missing))
            if status["projector"]["position"] is not None:
                return True
        return now - self._serving_since > self._times.status_s

    async def verdict(self) -> str:
        """Return who is missing of a fleet that did not get ready in time."""
        await self.look()
        return "; ".join(lines(self._missing)) or "a worker is there, and no frontend reaches it"

    async def look(self) -> None:
        """See who is missing now."""
        status = await self._ask()
        if status is not None:
            self._take(status)
        elif not self._missing:
            self._missing = dict.fromkeys(self._names, UNASKED)

    def tell(self) -> None:
        """Say who is awaited, and that nobody is any longer."""
        said, self._said = self._said, list(lines(self._missing))
        if self._said != said or not self.late:
            for line in self._said:
                say(line)
        if said and not self._said:
            say(f"nobody is awaited any longer: {self.there}")

    def _take(self, status: Mapping[str, Any]) -> None:
        outside = self._complete or self.late or (not self._patient and self._serving_since is not None)
        self._missing = absent(self._names, status, outside=outside)
        self.kept = frozenset(worker["id"] for worker in status["workers"] if worker.get("spare"))
        self._complete = self._complete or not self._missing

    async def _tell_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._times.say_every_s)
            if self._patient or self._serving_since is None:
                await self.look()
                self.tell()
