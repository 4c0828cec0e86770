"""One DP rank of the simulated engine: runs its scheduler's timed steps on the worker's loop.

A step is so cheap that a thread would only contend for the interpreter lock (5 ms per switch). So steps run as callbacks of the
event loop, one per turn, and the loop does its I/O between any two steps. Many steps may run in one turn if they have no
duration and only generate tokens, because a turn costs ten times as much as such a step.

uvloop rounds timers to whole milliseconds, and a step of a small model takes three; on Linux `Alarm` uses a timerfd.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

import uvloop

from events.wire import Chunk, Generate, Load
from workers.engines.engine import Announce, Deliver, MoveEnded, Phase, discard_events, discard_output
from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.sequence import EngineShape, Output
from workers.engines.simulated.timing import (
    SLOWED_STEP_S,
    SimulatedArrival,
    SimulatedDeparture,
    StepPlan,
    Timing,
)

_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
SHORT_S = 0.02  # shorter steps use a finer timer than the loop's, which would be too costly for all steps of many engines
LATE_S = 0.005  # a delay longer than this is not made up for
TURN_TOKENS = 512  # in a worker, tokens of steps without a duration per turn: less than half a millisecond
IDLE = Phase()


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("at", _Time))


class Alarm:
    """One timer; setting it again replaces the previous time. Raises OSError where there is no timerfd."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("this system has no timerfd")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS)
        if self.file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._set = False

    def set(self, at: float) -> None:
        """Make the file readable at a monotonic time in seconds, or at once if it has passed."""
        self._set = True
        self._arm(max(1, round(at * 1e9)))

    def cancel(self) -> None:
        """Disarm the timer."""
        self._set = False
        self._arm(0)

    def close(self) -> None:
        """Close the file, which no loop watches any more."""
        self._set = False
        os.close(self.file)

    def _arm(self, at_ns: int) -> None:
        setting = _Setting(_Time(0, 0), _Time(*divmod(at_ns, 1_000_000_000)))
        self._libc.timerfd_settime(self.file, _ABSOLUTE, ctypes.byref(setting), None)

    def expired(self) -> bool:
        """Return whether the alarm is due, True once for each `set`. For the reader of the file."""
        try:
            os.read(self.file, 8)
        except BlockingIOError:  # the alarm has been set again in the meantime
            return False
        expired, self._set = self._set, False
        return expired


class SimulatedRank:
    """One rank: a scheduler and its clock. The worker's calls and the steps run on the same loop, so there are no locks."""

    def __init__(self, number: int, shape: EngineShape, timing: Timing, turn_tokens: int = 0) -> None:
        self.shape = shape
        self.phase = IDLE
        self.pass_s = 0.0  # duration of the latest pass
        self.scheduler = Scheduler(shape)
        self.transit = self.scheduler.transit
        self.faults = self.scheduler.faults
        self._fatal: set[int] = set()  # keys of requests that end the process in the next pass with prefill
        self._number = number
        self.timing = timing
        self._turn_tokens = turn_tokens
        self._next: asyncio.Handle | Alarm | None = None  # the next callback; None while idle
        self._alarm: Alarm | None = None  # for loops with coarse timers
        self._due = 0.0  # when the alarm is due
        self.stepping = False  # a step with a duration is running
        self._holding: dict[asyncio.Future[None], SimulatedDeparture] = {}  # held when the step ends
        self._deliver: Deliver = discard_output
        self._announce: Announce = discard_events
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, deliver: Deliver, announce: Announce) -> None:
        """Start to accept requests, on the running loop."""
        self._deliver, self._announce = deliver, announce
        self._loop = asyncio.get_running_loop()
        self.scheduler.kv.heard = announce is not discard_events and self.shape.prefix_caching

    def stop(self) -> None:
        """Stop stepping and drop all requests and blocks."""
        if self._next is not None:
            self._next.cancel()
        if self._alarm is not None and self._loop is not None:
            self._loop.remove_reader(self._alarm.file)
            self._alarm.close()
        self._next, self._loop, self._alarm = None, None, None
        self.scheduler.drop_all()
        self._hold_all()

    def submit(self, key: int, request: Generate) -> None:
        """Accept a request, or deliver its refusal."""
        if refusal := self.scheduler.submit(key, request):
            self._deliver([(key, refusal)])
        else:
            if self.shape.fatal and _contains(request.tokens, self.shape.fatal):
                self._fatal.add(key)
            self.kick()

    def cancel(self, key: int) -> None:
        """Drop a request. Unknown keys are ignored."""
        self._fatal.discard(key)
        self.scheduler.cancel(key)
        self.kick()

    def trust(self, trusted: bool) -> None:
        """Hide all current blocks from other requests, and new ones until the worker is trusted again."""
        self.scheduler.trust(trusted)
        self._announce_events()

    def limit_batch(self, share: float) -> None:
        """Run at most this share of the batch at once, from the next step on."""
        self.scheduler.batch_limit = max(1, int(self.shape.batch_max * share))

    def refuse(self, key: int, refusal: Chunk) -> None:
        """Deliver the refusal of a request that no rank has accepted."""
        self._deliver([(key, refusal)])

    def reserve(self, key: int, request: Generate, room_tokens: int) -> SimulatedArrival | str:
        """Reserve the blocks for a request that arrives with its KV cache, or return why not."""
        arrival = self.scheduler.reserve(key, request, room_tokens)
        if self._next is None:
            self._announce_events()  # no step will end soon
        return arrival

    def load(self) -> Load:
        """Return the load of the rank."""
        return self.scheduler.load()

    async def hold(self, departure: SimulatedDeparture) -> None:
        """Stop decoding a request at the end of the current step. Raise MoveEnded if the engine stops first."""
        if self.faults.dead or self._loop is None:
            raise MoveEnded("the engine is dead")
        if not self.stepping:
            self.transit.hold(departure)
            return
        held: asyncio.Future[None] = self._loop.create_future()
        self._holding[held] = departure
        try:
            await held
        except asyncio.CancelledError:
            self.transit.resume(departure)  # the scheduler may already hold it
            self.kick()
            raise

    def kick(self) -> None:
        """Begin a step if the rank is idle and there is work."""
        if self._next is None and self._loop is not None and self.scheduler.busy:
            self._next = self._loop.call_soon(self._begin, self._loop.time())

    def _begin(self, at: float) -> None:
        """Begin a step that could begin at `at` (loop time), or become idle."""
        assert self._loop is not None
        plan = self.scheduler.plan()
        if plan.idle or self.faults.dead:
            self._next, self.phase = None, IDLE
            return
        if self._fatal and plan.prefill_tokens:
            os.kill(os.getpid(), signal.SIGABRT)  # like a failed assertion in a kernel: silently
        lasts = self.pass_s = self._step_s(plan)
        if not lasts:
            self.phase = Phase("decode", at)
            self._end(at, self.scheduler.rush(self._turn_tokens))
            return
        self.stepping = True
        self.phase = Phase("prefill" if plan.prefill_tokens else "decode", at, plan.prefill_tokens)
        due = at + lasts
        if lasts < SHORT_S and (alarm := self._fine()) is not None:
            self._due = due
            alarm.set(due)
            self._next = alarm
        else:
            self._next = self._loop.call_at(due, self._finish, due)

    def _fine(self) -> Alarm | None:
        """Return a finer timer than the loop's; None if the loop's is fine enough, or no finer one exists."""
        if self._alarm is None and isinstance(self._loop, uvloop.Loop):
            with contextlib.suppress(OSError):
                self._alarm = Alarm()
                self._loop.add_reader(self._alarm.file, self._rung)
        return self._alarm

    def _rung(self) -> None:
        if self._alarm is not None and self._alarm.expired():
            self._finish(self._due)

    def _step_s(self, plan: StepPlan) -> float:
        lasts, slow = self.timing.step_s(plan), self.faults.slow
        return lasts if slow == 1.0 else max(lasts, SLOWED_STEP_S) * slow

    def _finish(self, due: float) -> None:
        """Finish a step that was due at `due`."""
        self._end(due, self.scheduler.step())

    def _end(self, due: float, out: Output) -> None:
        """End a step that was due at `due`: deliver its output, and begin the next one in the next turn of the loop.

        The next step counts from the time when this one was due, so that timer delays do not add up. If the loop is later than
        LATE_S, the next step counts from now, to avoid a burst of steps.
        """
        assert self._loop is not None
        self.stepping = False
        now = self._loop.time()
        begin = due if now - due < LATE_S else now
        if self.scheduler.busy:
            self._next = self._loop.call_soon(self._begin, begin)
        else:
            self._next, self.phase = None, IDLE
        if out:
            self._deliver(out)
        self._announce_events()
        if self._holding:
            self._hold_all()

    def _announce_events(self) -> None:
        if events := self.scheduler.take_events():
            self._announce(self._number, events)

    def _hold_all(self) -> None:
        for held, departure in self._holding.items():
            if not held.done():
                self.transit.hold(departure)
                held.set_result(None)
        self._holding.clear()


def _contains(tokens: Sequence[int], wanted: tuple[int, ...]) -> bool:
    """Return whether `wanted` occurs in `tokens` as a consecutive run."""
    size, first = len(wanted), wanted[0]
    return any(
        tokens[place] == first and tuple(tokens[place : place + size]) == wanted
        for place in range(len(tokens) - size + 1)
    )
