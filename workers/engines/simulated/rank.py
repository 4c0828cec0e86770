"""Runs the timed steps of one DP rank of the simulated engine on the worker's event loop.

A step is so cheap that a thread for it would only contend for the interpreter lock (5 ms per switch). So each step is a callback
of the event loop, and the loop does its I/O between two steps. If steps have no duration and only generate tokens, many of them
run in one loop iteration, because an iteration costs ten times as much as such a step.

uvloop rounds timers to whole milliseconds, which is too coarse for a step of a small model (about 3 ms). So on Linux, `Alarm`
uses a timerfd.
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
SHORT_S = 0.02  # shorter steps use the finer timer, which would be too costly for all steps of many engines
LATE_S = 0.005  # the next step does not make up for a longer delay
# tokens of steps without a duration per loop iteration of a worker, which take less than 0.5 ms
TURN_TOKENS = 512
IDLE = Phase()


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("at", _Time))


class Alarm:
    """A sub-millisecond timer, which uses a timerfd. The event loop watches `file`, which becomes readable at the set time.

    The constructor raises OSError if the system has no timerfd.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("this system has no timerfd")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS)
        if self.file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._set = False

    def set(self, at: float) -> None:
        """Set the timer to a monotonic time in seconds. This replaces the previous time. A time in the past expires at once."""
        self._set = True
        self._arm(max(1, round(at * 1e9)))

    def cancel(self) -> None:
        """Disarm the timer."""
        self._set = False
        self._arm(0)

    def close(self) -> None:
        """Close `file`. The event loop must have stopped watching it before."""
        self._set = False
        os.close(self.file)

    def _arm(self, at_ns: int) -> None:
        setting = _Setting(_Time(0, 0), _Time(*divmod(at_ns, 1_000_000_000)))
        self._libc.timerfd_settime(self.file, _ABSOLUTE, ctypes.byref(setting), None)

    def expired(self) -> bool:
        """Return whether the set time has passed. True is returned at most once per `set`. Called when the file is readable."""
        try:
            os.read(self.file, 8)
        except BlockingIOError:  # the alarm has been set again in the meantime
            return False
        expired, self._set = self._set, False
        return expired


class SimulatedRank:
    """One DP rank: a scheduler, and the timer of its steps.

    There are no locks, because the worker's calls and the steps run on the same event loop.
    """

    def __init__(self, number: int, shape: EngineShape, timing: Timing, turn_tokens: int = 0) -> None:
        self.shape = shape
        self.phase = IDLE
        self.pass_s = 0.0  # duration of the latest pass
        self.scheduler = Scheduler(shape)
        self.transit = self.scheduler.transit
        self.faults = self.scheduler.faults
        # keys of requests with fatal tokens: the next pass with prefill ends the process
        self._fatal: set[int] = set()
        self._number = number
        self.timing = timing
        self._turn_tokens = turn_tokens
        self._next: asyncio.Handle | Alarm | None = None  # the next callback; None while idle
        self._alarm: Alarm | None = None  # the finer timer; None until a short step needs it
        self._due = 0.0  # end of the step for which the alarm is set; loop seconds
        self.stepping = False  # a step with a duration is running
        # departures to hold when the step ends
        self._holding: dict[asyncio.Future[None], SimulatedDeparture] = {}
        self._deliver: Deliver = discard_output
        self._announce: Announce = discard_events
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, deliver: Deliver, announce: Announce) -> None:
        """Start to accept requests on the running event loop."""
        self._deliver, self._announce = deliver, announce
        self._loop = asyncio.get_running_loop()
        self.scheduler.kv.heard = announce is not discard_events and self.shape.prefix_caching

    def stop(self) -> None:
        """Stop the steps, and drop all requests and their blocks."""
        if self._next is not None:
            self._next.cancel()
        if self._alarm is not None and self._loop is not None:
            self._loop.remove_reader(self._alarm.file)
            self._alarm.close()
        self._next, self._loop, self._alarm = None, None, None
        self.scheduler.drop_all()
        self._hold_all()

    def submit(self, key: int, request: Generate) -> None:
        """Accept a request, or deliver the chunk that refuses it."""
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
        """Stop the reuse of all blocks computed so far.

        If not `trusted`, later blocks are not reused either, until a call with `trusted` true.
        """
        self.scheduler.trust(trusted)
        self._announce_events()

    def limit_batch(self, share: float) -> None:
        """Limit the running batch to this share of its full size, from the next step on."""
        self.scheduler.batch_limit = max(1, int(self.shape.batch_max * share))

    def refuse(self, key: int, refusal: Chunk) -> None:
        """Deliver the chunk `refusal`, for a request to a DP rank that does not exist."""
        self._deliver([(key, refusal)])

    def reserve(self, key: int, request: Generate, room_tokens: int) -> SimulatedArrival | str:
        """Reserve KV blocks for a request that arrives with its KV cache, or return the reason for a refusal.

        `room_tokens` is the largest number of tokens that the request can have when it arrives.
        """
        arrival = self.scheduler.reserve(key, request, room_tokens)
        if self._next is None:
            self._announce_events()  # no step will end soon
        return arrival

    def load(self) -> Load:
        """Return the load of the rank."""
        return self.scheduler.load()

    async def hold(self, departure: SimulatedDeparture) -> None:
        """Wait until the current step ends, then stop a request that moves to another worker.

        The stopped request leaves the batch and generates no tokens, but keeps its KV blocks. Raise MoveEnded if the engine is
        dead or stopped.
        """
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
            self.transit.resume(departure)  # has an effect only if the request is already held
            self.kick()
            raise

    def kick(self) -> None:
        """Schedule a step if the rank is idle and there is work."""
        if self._next is None and self._loop is not None and self.scheduler.busy:
            self._next = self._loop.call_soon(self._begin, self._loop.time())

    def _begin(self, at: float) -> None:
        """Begin a step, or become idle if there is no work. The step's duration counts from the loop time `at`."""
        assert self._loop is not None
        plan = self.scheduler.plan()
        if plan.idle or self.faults.dead:
            self._next, self.phase = None, IDLE
            return
        if self._fatal and plan.prefill_tokens:
            # ends the process without a message, as a failed assertion in a GPU kernel
            os.kill(os.getpid(), signal.SIGABRT)
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
        """Return the sub-millisecond timer. Return None if the event loop is not uvloop, or if the system has no timerfd."""
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
        """Generate the tokens of a step that was due to end at the loop time `due`, and end the step."""
        self._end(due, self.scheduler.step())

    def _end(self, due: float, out: Output) -> None:
        """Deliver the output of a step that was due to end at the loop time `due`, and schedule the next step.

        The next step begins in the next loop iteration. Its duration counts from `due`, so that timer delays do not add up. If
        the delay is at least LATE_S (5 ms), the duration counts from now, to avoid a burst of steps.
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
    """Return whether `tokens` contains the whole of `wanted` as a run of consecutive tokens."""
    size, first = len(wanted), wanted[0]
    return any(
        tokens[place] == first and tuple(tokens[place : place + size]) == wanted
        for place in range(len(tokens) - size + 1)
    )
