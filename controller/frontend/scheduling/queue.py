"""Who waits for a worker while all of a model's are busy?

    enter ── nobody waits, and a worker has room ──▶ in
      └────▶ in line ── its turn, and a worker has room ──▶ in ── none at the worker after all ──▶ before all in line
               ├── the line is full, or the deadline has passed, or all are sent away ──▶ refused
               ├── nobody can serve the model any more ──▶ refused
               └── its client has gone ──▶ out of the line

First come, first served; each model has a line of its own, so who waits for one holds up nobody who wants another. Where requests
are let in by their deadlines, the lines are those of `deadlines`. Who was in already and was sent back for want of room comes
before the others; since he is bound to some of the workers, he holds up nobody who would go to another one.

What a reader would get wrong: room that becomes free is given away at the end of the turn of the loop, never at once. A
request that has just been let in launches its generations in that turn, and they take its room over.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
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


class QueueLine(Protocol[R]):
    """A line, and how whoever is next finds room."""

    def __len__(self) -> int: ...
    def __iter__(self) -> "Iterator[asyncio.Future[R]]": ...

    def head(self) -> "asyncio.Future[R] | None":
        """Return whose turn it is; None: nobody waits."""
        ...

    def take(self, turn: "asyncio.Future[R]") -> R:
        """Return room for it. Raise NoWorker."""
        ...

    def remove(self, turn: "asyncio.Future[R]") -> None:
        """Take one out: it has its room, or does not wait any more. Whoever is not in line is ignored."""
        ...


class _ByArrival(Generic[R]):
    """First come, first served."""

    def __init__(self, take: Callable[[], R]) -> None:
        self._take = take
        self._turns: OrderedDict[asyncio.Future[R], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> "Iterator[asyncio.Future[R]]":
        return iter(self._turns)

    def push(self, turn: "asyncio.Future[R]") -> None:
        self._turns[turn] = None

    def head(self) -> "asyncio.Future[R] | None":
        return next(iter(self._turns), None)

    def take(self, turn: "asyncio.Future[R]") -> R:
        return self._take()

    def remove(self, turn: "asyncio.Future[R]") -> None:
        self._turns.pop(turn, None)


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
        self._lines: dict[str, dict[Hashable, QueueLine[R]]] = {}  # each model's, by what they are lines for
        self._back: dict[
            str, OrderedDict[asyncio.Future[R], Callable[[], R]]
        ] = {}  # before them: how each finds room
        self._due: set[str] = set()  # models whose lines move on when this turn of the loop is over

    def length(self, model: str) -> int:
        """Return how many requests wait for a worker of this model."""
        return self._in_line(model) + len(self._back.get(model, ()))

    def _in_line(self, model: str) -> int:
        lines = self._lines.get(model)
        return sum(map(len, lines.values())) if lines else 0

    def waiting(self) -> dict[str, int]:
        """Return the models for which requests wait, and how many."""
        return {model: count for model in self._lines | self._back if (count := self.length(model))}

    def sent_back(self, model: str) -> bool:
        """Say whether some wait who were in already; let them look."""
        if not self._back.get(model):
            return False
        self.wake(model)
        return True

    def line(self, model: str, name: Hashable, make: Callable[[], QueueLine[R]]) -> QueueLine[R]:
        """Return a line of a model's by its name; made, if there is none."""
        lines = self._lines.setdefault(model, {})
        found = lines.get(name)
        if found is None:
            found = lines[name] = make()
        return found

    async def enter(self, model: str, deadline_s: float) -> R:
        """Return room for a request, at once or when its turn has come. Raise QueueFull, WaitedTooLong, or NoWorker for
        another reason than that all are busy."""
        if not self.sent_back(model) and not self._in_line(model):
            try:
                return self._take(model)
            except AllBusy:
                pass
        line = self.line(model, None, lambda: _ByArrival(lambda: self._take(model)))
        assert isinstance(line, _ByArrival)
        return await self.stand(model, line, line.push, deadline_s)

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

    async def stand(
        self,
        model: str,
        line: QueueLine[R],
        push: "Callable[[asyncio.Future[R]], object]",
        deadline_s: float,
    ) -> R:
        """Wait in a line, into which `push` puts the turn. Return the room. Raise QueueFull, WaitedTooLong, or NoWorker for
        another reason than that all are busy."""
        if (waiting := self._in_line(model)) >= self._max:
            raise QueueFull(f"{waiting} requests wait for a worker already")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[R] = loop.create_future()
        push(turn)
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
            line.remove(turn)
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
        lines = chain.from_iterable(lines.values() for lines in self._lines.values())
        for turn in [*chain.from_iterable(lines), *chain(*self._back.values())]:
            if not turn.done():
                turn.set_exception(WaitedTooLong(why))

    def wake(self, model: str | None = None) -> None:
        """A worker may have become free: let those who wait look, when this turn of the loop is over."""
        for name in (model,) if model is not None else (*self._lines, *self._back):
            if (self._in_line(name) or self._back.get(name)) and name not in self._due:
                self._due.add(name)
                asyncio.get_running_loop().call_soon(self._move_on, name)

    def _move_on(self, model: str) -> None:
        """Let as many in as there is room for, each line in its own order."""
        self._due.discard(model)
        if model in self._back:
            self._let_back_in(self._back[model])
        for line in self._lines.get(model, {}).values():
            self._let_in(line)

    def _let_in(self, line: QueueLine[R]) -> None:
        while (turn := line.head()) is not None:
            if not turn.done():  # else its time is over, or its client has gone
                try:
                    turn.set_result(line.take(turn))
                except AllBusy:
                    return
                except NoWorker as error:
                    turn.set_exception(error)
            line.remove(turn)

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
