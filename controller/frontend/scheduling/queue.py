"""Who waits for a worker while all of a model's are busy?

    enter ── nobody waits, and a worker has room ──▶ in
      └────▶ in line ── the first, and a worker has room ──▶ in ── none at the worker after all ──▶ before all in line
               ├── the line is full, or the deadline has passed, or all are sent away ──▶ refused
               ├── nobody can serve the model any more ──▶ refused
               └── its client has gone ──▶ out of the line

First come, first served; each model has a line of its own, so who waits for one holds up nobody who wants another. Who was in
already and was sent back for want of room comes before the others; since he is bound to some of the workers, he holds up nobody
who would go to another one.

What a reader would get wrong: room that becomes free is given away at the end of the turn of the loop, never at once. A
request that has just been let in launches its generations in that turn, and they take its room over.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from controller.router.selection.filter import AllBusy, NoWorker
from events.errors import HoldfastError

LOOKS_MAX = 16  # of those who were in already, in vain, at one time
Outcome: TypeAlias = Literal["admitted", "timeout", "no_worker", "gone"]


class Room(Protocol):
    """Room for one request at a worker."""

    def free(self) -> None:
        """Give it back."""
        ...


R = TypeVar("R", bound=Room)


class QueueFull(HoldfastError):
    """So many requests wait for a worker already that no more may."""


class WaitedTooLong(HoldfastError):
    """No worker became free in time."""


class Queue(Generic[R]):
    """The lines before the workers of each model."""

    def __init__(
        self, take: Callable[[str], R], requests_max: int, ended: Callable[[str, Outcome, float], object]
    ) -> None:
        """Begin without anybody. `take` finds room at a worker of a model, or raises NoWorker; `ended` is told of each wait how
        it ended, and after how many seconds."""
        self._take = take
        self._max = requests_max
        self._ended = ended
        self._lines: dict[str, OrderedDict[asyncio.Future[R], None]] = {}  # in the order of their arrival
        self._back: dict[
            str, OrderedDict[asyncio.Future[R], Callable[[], R]]
        ] = {}  # before them: how each finds room
        self._due: set[str] = set()  # models whose line moves on when this turn of the loop is over

    def length(self, model: str) -> int:
        """Return how many requests wait for a worker of this model."""
        return len(self._lines.get(model, ())) + len(self._back.get(model, ()))

    def waiting(self) -> dict[str, int]:
        """Return the models for which requests wait, and how many."""
        return {model: count for model in self._lines | self._back if (count := self.length(model))}

    async def enter(self, model: str, deadline_s: float) -> R:
        """Return room for a request, at once or when its turn has come. Raise QueueFull, WaitedTooLong, or NoWorker for
        another reason than that all are busy."""
        if self._back.get(model):
            self.wake(model)
        elif not self._lines.get(model):
            try:
                return self._take(model)
            except AllBusy:
                pass
        return await self._wait(model, deadline_s)

    def again(self, model: str, deadline_s: float, take: Callable[[], R]) -> "asyncio.Future[R]":
        """Let a request that was in wait once more, before all others: `take` finds room for it, or raises NoWorker. The future
        becomes the room, or WaitedTooLong, or NoWorker for another reason than that all are busy; whoever does not want it any
        more cancels it, or frees the room."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[R] = loop.create_future()
        self._back.setdefault(model, OrderedDict())[turn] = take
        late = loop.call_later(deadline_s, _refuse, turn, deadline_s)
        turn.add_done_callback(partial(self._leave, model, late, loop.time()))
        self.wake(model)
        return turn

    def _leave(self, model: str, late: asyncio.TimerHandle, began: float, turn: "asyncio.Future[R]") -> None:
        """One that waited once more waits no longer."""
        late.cancel()
        del self._back[model][turn]
        if turn.cancelled():
            outcome: Outcome = "gone"
            self.wake(model)
        elif (error := turn.exception()) is None:
            outcome = "admitted"
        else:
            outcome = "timeout" if isinstance(error, WaitedTooLong) else "no_worker"
        self._ended(model, outcome, asyncio.get_running_loop().time() - began)

    async def _wait(self, model: str, deadline_s: float) -> R:
        line = self._lines.setdefault(model, OrderedDict())
        if len(line) >= self._max:
            raise QueueFull(f"{len(line)} requests wait for a worker already")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[R] = loop.create_future()
        line[turn] = None
        late = loop.call_later(deadline_s, _refuse, turn, deadline_s)
        began = loop.time()
        outcome: Outcome = "gone"
        try:
            room = await turn
            outcome = "admitted"
            return room
        except WaitedTooLong:
            outcome = "timeout"
            raise
        except NoWorker:
            outcome = "no_worker"
            raise
        finally:
            late.cancel()
            line.pop(turn, None)
            if outcome == "gone":
                self._withdraw(model, turn)
            self._ended(model, outcome, loop.time() - began)

    def _withdraw(self, model: str, turn: "asyncio.Future[R]") -> None:
        """A client has gone: nobody waits behind him in vain, also where his turn had come in this very moment."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().free()
        turn.cancel()
        self.wake(model)

    def send_away(self, why: str) -> None:
        """Refuse everybody who waits."""
        for turn in chain(*self._lines.values(), *self._back.values()):
            if not turn.done():
                turn.set_exception(WaitedTooLong(why))

    def wake(self, model: str | None = None) -> None:
        """A worker may have become free: let those who wait look, when this turn of the loop is over."""
        for name in (model,) if model is not None else (*self._lines, *self._back):
            if (self._lines.get(name) or self._back.get(name)) and name not in self._due:
                self._due.add(name)
                asyncio.get_running_loop().call_soon(self._move_on, name)

    def _move_on(self, model: str) -> None:
        """Let as many in as there is room for, in the order of their arrival."""
        self._due.discard(model)
        if model in self._back:
            self._let_back_in(self._back[model])
        line = self._lines.get(model)
        while line:
            turn = next(iter(line))
            if not turn.done():  # else its time is over, or its client has gone
                try:
                    turn.set_result(self._take(model))
                except AllBusy:
                    return
                except NoWorker as error:
                    turn.set_exception(error)
            del line[turn]

    def _let_back_in(self, line: "OrderedDict[asyncio.Future[R], Callable[[], R]]") -> None:
        refused = 0
        for turn, take in list(line.items()):
            if turn.done():
                continue
            try:
                turn.set_result(take())
            except AllBusy:
                refused += 1
                if refused == LOOKS_MAX:
                    return
            except NoWorker as error:
                turn.set_exception(error)


def _refuse(turn: "asyncio.Future[R]", deadline_s: float) -> None:
    if not turn.done():
        turn.set_exception(WaitedTooLong(f"no worker became free within {deadline_s:g} s"))
