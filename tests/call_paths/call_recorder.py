"""Records which of the project's files call which while a path through the system runs.

`sys.setprofile` reports each call. An edge goes from the nearest calling function of the project to the called one. Functions
of the standard library, of dependencies and of tests in between are skipped, and so are lambdas. The event loop hides no call:

- a callback (`call_soon`, `call_later`, `call_at`, `call_soon_threadsafe`, `add_reader`, `run_in_executor`, the done callback of
  a future) and the first step of a task count as called by the file that scheduled them;
- the getter of an `asyncio.Queue` counts as called by the putter of the item, the waiter of an `asyncio.Event` by its setter.

A coroutine that resumes because an awaited operation has completed counts as returned to, not as called. Comprehensions and
module imports do not count.

Timers that were set before the recording (or before `hold_timers`) run after it, so heartbeats and other periodic work never
appear in a recording by chance. Generators that earlier tests left to the garbage collector do not appear either.
"""

import asyncio
import gc
import sys
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = ("controller", "events", "migrations", "workers")
NO_CALLS = {"<dictcomp>", "<genexpr>", "<listcomp>", "<module>", "<setcomp>"}
HANDLE = (
    asyncio.Handle._run.__code__
)  # runs a callback of the loop: the frames below it did not call the callback
PUT, GET = asyncio.Queue.put_nowait.__code__, asyncio.Queue.get_nowait.__code__
SET, WAIT = asyncio.Event.set.__code__, asyncio.Event.wait.__code__
PATCHED = ("call_soon", "call_soon_threadsafe", "call_at", "add_reader", "run_in_executor")
REST_S = 0.05  # the path's result is there, but callbacks that it scheduled still belong to it

Callback = Callable[..., Any]


@dataclass
class Way:
    """The files that ran, and the calls between two of them."""

    files: set[str] = field(default_factory=set)
    edges: dict[tuple[str, str], set[str]] = field(default_factory=dict)  # (caller, called): called functions

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of files that call each other both ways."""
        return sorted(edge for edge in self.edges if edge[0] < edge[1] and edge[::-1] in self.edges)


class _Scheduled(threading.local):
    """The file that scheduled what runs in this thread."""

    caller = ""
    waker = ""  # the file that set the event for which the resumed task waits


class CallRecorder:
    """Records a path in the running event loop, and in threads that start while it is installed."""

    def __init__(self, root: Path = ROOT, folders: Sequence[str] = OURS) -> None:
        self.way = Way()
        self._root = f"{root}/"
        self._ours = tuple(f"{root}/{folder}/" for folder in folders)
        self._loop: object = asyncio.get_running_loop()
        self._scheduled = _Scheduled()
        self._recording = self._holding = False
        self._held: list[Callable[[], object]] = []
        self._putters: defaultdict[int, deque[str]] = defaultdict(
            deque
        )  # putters of a queue's items, by the queue's id

    @contextmanager
    def installed(self) -> Iterator["CallRecorder"]:
        """Wrap the loop's methods that defer calls."""
        real = {name: getattr(self._loop, name) for name in PATCHED}

        def call_soon(callback: Callback, *args: object, **more: object) -> object:
            return real["call_soon"](self._deferred(callback, args), *args, **more)

        def call_soon_threadsafe(callback: Callback, *args: object, **more: object) -> object:
            return real["call_soon_threadsafe"](self._deferred(callback, args), *args, **more)

        def call_at(
            when: float, callback: Callback, *args: object, **more: object
        ) -> object:  # also called by `call_later`
            return real["call_at"](when, self._timer(self._deferred(callback, args)), *args, **more)

        def add_reader(fd: object, callback: Callback, *args: object) -> None:
            real["add_reader"](fd, self._deferred(callback, args), *args)

        def run_in_executor(executor: Executor | None, function: Callback, *args: object) -> object:
            if executor is None or isinstance(executor, ThreadPoolExecutor):
                function = self._deferred(function, args)
            return real["run_in_executor"](executor, function, *args)

        wrappers = (call_soon, call_soon_threadsafe, call_at, add_reader, run_in_executor)
        vars(self._loop).update(zip(PATCHED, wrappers, strict=True))
        threading.setprofile(self._profile)
        try:
            yield self
        finally:
            threading.setprofile(None)
            for name in PATCHED:
                del vars(self._loop)[name]

    def hold_timers(self) -> None:
        """Delay timers that are already set until after the recording."""
        self._holding = True

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[Way]:
        """Record until the context ends, including what was scheduled by then."""
        gc.collect()
        gc.disable()
        self._recording = self._holding = True
        sys.setprofile(self._profile)
        try:
            yield self.way
            await asyncio.sleep(REST_S)  # work that was scheduled belongs to the recording
        finally:
            sys.setprofile(None)
            self._recording = self._holding = False
            gc.enable()
            for callback in self._held:
                callback()

    def _timer(self, callback: Callback) -> Callback:
        early = not self._holding

        def run(*args: object) -> None:
            if early and self._holding:
                self._held.append(lambda: callback(*args))
            else:
                callback(*args)

        return run

    def _deferred(self, callback: Callback, args: Sequence[object]) -> Callback:
        """Return the callback, bound to the file that scheduled it."""
        if not self._recording:
            return callback
        resumes = getattr(callback, "__name__", "") == "task_wakeup"
        completes = resumes or any(asyncio.isfuture(argument) for argument in args)
        caller, sets_event = "", False
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not HANDLE and not caller:
            sets_event = sets_event or frame.f_code is SET
            caller, frame = self._file(frame.f_code), frame.f_back
        if not caller and not completes:
            caller = self._scheduled.caller  # asyncio deferred an already deferred callback
        waker = caller if sets_event else ""
        caller = "" if resumes else caller

        def run(*args: object) -> object:
            now = self._scheduled
            before, (now.caller, now.waker) = (now.caller, now.waker), (caller, waker)
            try:
                return callback(*args)
            finally:
                now.caller, now.waker = before

        return run

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self._recording:
            return
        code = frame.f_code
        if called := self._file(code):
            if code.co_name not in NO_CALLS:
                self.way.files.add(called)
                self._edge(self._caller(frame), called, code.co_qualname)
        elif code is PUT:
            self._putters[id(frame.f_locals["self"])].append(self._caller(frame))
        elif code is GET:
            if putters := self._putters[id(frame.f_locals["self"])]:
                self._edge(putters.popleft(), self._caller(frame), "the getter of a queue")
        elif code is WAIT and self._scheduled.waker:
            self._edge(self._scheduled.waker, self._caller(frame), "the waiter of an event")

    def _edge(self, caller: str, called: str, function: str) -> None:
        if caller and called and caller != called:
            self.way.edges.setdefault((caller, called), set()).add(function)

    def _caller(self, called: FrameType) -> str:
        """Return the nearest calling file of the project, or else the one that scheduled what runs."""
        frame = called.f_back
        while frame is not None and frame.f_code is not HANDLE:
            if file := self._file(frame.f_code):
                return file
            frame = frame.f_back
        return self._scheduled.caller

    def _file(self, code: CodeType) -> str:
        """Return a function's file relative to the project's root; empty for a lambda or foreign code."""
        ours = code.co_filename.startswith(self._ours) and code.co_name != "<lambda>"
        return code.co_filename[len(self._root) :] if ours else ""
