"""When is which frontend owed a sign of life?

A frame goes to each frontend at least every 100 ms while that frontend has streams open, every second otherwise, to all of
those at once. Where no step has been sent, that is a beat; while steps are, one comes every 0.25 s.
It carries what the engine does and for how long, because a stuck engine behind a live loop can only be told by that.
"""

import asyncio
import time

from events.wire import Beat
from workers.connection import FrontendConnection
from workers.engines.engine import Engine
from workers.serving.drain_state import DrainState
from workers.serving.frontends import FrontendConnections

TICK_S = 0.08  # leaves a timer 20 ms of lateness before 100 ms have passed
LOAD_S = 0.24  # how old the last beat gets while steps are sent
IDLE_BEAT_S = 1.0
HELLO_S_MAX = 5.0  # a connection that says nothing is closed


class Heartbeats:
    """Beats to the frontends of one worker."""

    def __init__(self, engine: Engine, connections: FrontendConnections, drain: DrainState) -> None:
        self._engine = engine
        self._connections = connections
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._due = 0.0  # when
        self._idle_due = 0.0  # when frontends without streams are owed the next beat

    def start(self) -> None:
        """Begin to beat, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._next(self._loop.time() + TICK_S)

    def stop(self) -> None:
        """Beat no more."""
        if self._ticking is not None:
            self._ticking.cancel()

    def beat(self) -> Beat:
        """Return how the engine fares right now."""
        engine, draining = self._engine, self._drain.draining
        phase = engine.phase()
        age_ms = max(0.0, (time.monotonic() - phase.since) * 1e3) if phase.name != "idle" else 0.0
        return Beat(phase.name, age_ms, phase.prefill_tokens, engine.load(), draining, engine.ranks())

    def beat_all(self) -> None:
        """Beat to every frontend at once, whatever it is owed."""
        self._connections.tell(self.beat())

    def hasten(self) -> None:
        """Take in that a stream has begun: its frontend is owed frames sooner than one that has none."""
        assert self._loop is not None
        due = self._loop.time() + TICK_S
        if due < self._due:
            self._next(due)

    def _tick(self) -> None:
        """Beat where a frame is owed, and come back when the next one may be: a thousand idle servers share a loop."""
        assert self._loop is not None
        now = self._loop.time()
        if idle := now >= self._idle_due - TICK_S / 4:
            self._idle_due = now + IDLE_BEAT_S - TICK_S
        due, beat = self._idle_due, None
        self._connections.cut_strangers(now - HELLO_S_MAX)
        for connection in list(self._connections.open):
            if not connection.frontend:
                continue
            connection.cut_if_stalled(now)
            owed = now >= _owed(connection) - TICK_S / 4 if connection.streams else idle
            if owed and not connection.behind:
                beat = beat or self.beat()
                connection.beaten_at = now
                connection.send(beat)
            if connection.streams:
                due = min(due, _owed(connection))
        self._next(max(now + TICK_S / 4, due))

    def _next(self, due: float) -> None:
        """Tick at `due`, and no sooner."""
        assert self._loop is not None
        if self._ticking is not None:
            self._ticking.cancel()
        self._due = due
        self._ticking = self._loop.call_at(due, self._tick)


def _owed(connection: FrontendConnection) -> float:
    """Return when a connection with streams is owed the next beat. Steps say that the worker lives; how loaded it is only
    beats say."""
    return min(max(connection.beaten_at, connection.stepped_at) + TICK_S, connection.beaten_at + LOAD_S)
