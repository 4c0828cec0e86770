"""Detects hung workers, which have open streams but send no frames or make no progress.

    silence      the event loop of a worker with open streams sends a frame at least every 100 ms, whatever the
                 engine does; 400 ms without a frame mean a hung process or a cut network
    stuck step   a live event loop reports the age of the engine's step; the limit is a minimum or a multiple of
                 the recent step time, whichever is larger, plus an allowance for each prompt token of a prefill

This module only computes with times that its callers pass. Lag is the time for which this process's own event loop did not run
and so read no frames. The lag is subtracted from every worker's silence before any worker is judged. The recent step time is
measured between outputs. It is not taken from the step ages in beats (the worker's periodic frames), because a stuck step would
then raise its own limit.

If the event loop of a process with several workers is late, all its workers are silent together. They must not count as hung.
In this diagram, A, B and C are workers of one process, and each `|` is a frame:

    A   | | | | |                | | | |        The lateness is known once one of the workers sends again, and is
    B    | | | | |                | | | |       subtracted from the silence of all. Until then, three times the recent
    C    | | | hung                             lateness is tolerated, and at least 0.6 s. C was silent while A and B
         ──────────  late  ───────────────▶     were sending, so C is hung, and is detected as fast as a single worker.
"""

from dataclasses import dataclass
from math import inf

from events.wire import Beat

OWED_S = 0.1  # maximum interval between frames of a worker that has open streams of this process
OWED_IDLE_S = 1.0  # maximum interval between frames of any other worker
LATE_S_MIN = 0.06  # shorter lateness is not recorded; slightly longer than the interval of the hang watch
LATE_S_BORNE = 0.6  # tolerated lateness of a worker process that was not late recently
LATE_FACTOR = 3.0  # multiple of the longest recent lateness that is tolerated
LATE_MEMORY_S = 30.0  # how long a lateness counts as recent


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """The thresholds above which silence or a slow step counts as a hang."""

    silence_s: float = 0.4  # maximum time without a frame while streams are open
    tick_s: float = 0.05  # interval at which connections are judged
    lag_s: float = 0.02  # a check that is later than this is a lag of this process's event loop
    step_factor: float = 10.0  # limit of a step as a multiple of the recent step time
    step_floor_s: float = 5.0  # minimum of that limit, because a step can take seconds on a busy CPU
    prefill_s_per_token: float = 0.03  # added to that limit for each prompt token of a prefill
    # if all workers are silent for less than this, this process is assumed to be the cause
    all_silent_s: float = 2.0
    step_memory_s_max: float = 10.0  # maximum step time that is recorded


@dataclass(slots=True, eq=False)
class Process:
    """Measures the lateness of a worker process: the time by which the frames of all its workers are late together.

    It has no effect for a process with one worker.
    """

    _heard_at: float  # time of the last frame of any of its workers
    shared: bool = False  # whether more than one worker runs in the process, as set by `WorkerLinks`
    late_s: float = 0.0  # total time in which a frame of each worker was due and none arrived
    look_due: float = inf  # time of the hang watch's next check; time after it is lag of this process
    _worst_s: float = 0.0  # the longest recent lateness
    _late_at: float = -inf  # time of the longest recent lateness

    def frame_received(self, owed_at: float, now: float) -> None:
        """Record a frame that arrived at `now` from a worker of this process and was due at `owed_at`."""
        heard_at = min(now, self.look_due)
        late_s = heard_at - max(owed_at, self._heard_at)
        if late_s > 0:
            self.late_s += late_s
            if late_s > LATE_S_MIN and (late_s >= self._worst_s or now - self._late_at > LATE_MEMORY_S):
                self._worst_s, self._late_at = late_s, now
        self._heard_at = now

    def excuse(self, lag_s: float, now: float) -> None:
        """Subtract `lag_s` seconds from the workers' silence, because the observing process's event loop did not run."""
        self._heard_at = min(now, self._heard_at + lag_s)

    def excused_s(self, now: float, most_s: float) -> float:
        """Return how many seconds of the current silence may be lateness of the whole process, at most `most_s`."""
        if not self.shared:
            return 0.0
        worst_s = self._worst_s if now - self._late_at <= LATE_MEMORY_S else 0.0
        return min(now - self._heard_at, max(LATE_S_BORNE, LATE_FACTOR * worst_s), most_s)


@dataclass(slots=True, eq=False)
class HangDetector:
    """Detects whether the worker of one connection hangs, from the times of its frames and the contents of its beats."""

    policy: HangPolicy
    heard_at: float  # time of the last frame
    process: Process
    age_s: float = 0.0  # age of the engine's step in the last beat
    phase: str = "idle"
    prefill_tokens: int = 0
    open_streams: int = 0
    _late_s: float = 0.0  # the process's `late_s` at this worker's last frame
    _recent_s: float = 0.0  # duration of the slowest recent step, which decays with each further step
    # time of the last output; None if there was none since a stream was opened
    _stepped_at: float | None = None

    def __post_init__(self) -> None:
        self._late_s = self.process.late_s

    def opened(self, now: float) -> None:
        """Record the opening of a stream. If no other stream is open, the worker's silence counts from `now`."""
        if not self.open_streams:
            self.heard_at = max(self.heard_at, now)
            self._late_s = self.process.late_s
            self._stepped_at = None
        self.open_streams += 1

    def frame_received(self, now: float) -> None:
        """Record a frame of any kind that arrived at `now`."""
        if self.process.shared:
            self.process.frame_received(self.heard_at + (OWED_S if self.open_streams else OWED_IDLE_S), now)
            self._late_s = self.process.late_s
        self.heard_at = now

    def closed(self) -> None:
        """Record the end of a stream."""
        self.open_streams -= 1

    def stepped(self, now: float, steps: int = 1) -> None:
        """Record the output of `steps` engine steps that arrived together at `now`."""
        if self._stepped_at is not None:
            took = min(now - self._stepped_at, self.policy.step_memory_s_max)
            self._recent_s = max(took, self._recent_s * 0.98)
        self._recent_s *= 0.98 ** (steps - 1)
        self._stepped_at = now
        self.age_s = 0.0

    def beat(self, beat: Beat) -> None:
        """Record the state of the engine that a beat (periodic frame) reports."""
        self.age_s = 0.0 if beat.phase == "idle" else beat.step_age_ms / 1000
        self.phase = beat.phase
        self.prefill_tokens = beat.prefill_tokens

    def excuse(self, lag_s: float, now: float) -> None:
        """Subtract `lag_s` seconds from the silence, because this process's event loop did not run and read no frames."""
        self.heard_at = min(now, self.heard_at + lag_s)

    def silent_s(self, now: float) -> float:
        """Return the seconds since the worker's last frame, minus the lateness of its process; 0 if no stream is open."""
        if not self.open_streams:
            return 0.0
        process = self.process
        late_s = process.late_s - self._late_s + process.excused_s(now, self.policy.all_silent_s)
        return now - self.heard_at - late_s

    def step_limit_s(self) -> float:
        """Return the maximum age in seconds of the engine's current step."""
        policy = self.policy
        usual = max(policy.step_floor_s, policy.step_factor * self._recent_s)
        return usual + policy.prefill_s_per_token * self.prefill_tokens

    @property
    def stuck(self) -> bool:
        """Whether the engine's current step is older than the limit, according to the worker's last beat (periodic frame)."""
        return self.age_s > self.policy.step_floor_s and self.age_s > self.step_limit_s()

    def gets_on(self, now: float, own_tokens: int) -> bool:
        """Return whether the engine is known to make progress.

        False if the worker is silent or its engine's step is stuck. Any other step counts as progress up to the age
        `policy.step_floor_s`. An older step counts only if it prefills more tokens than `own_tokens`, those of the caller's own
        request, because it then prefills other requests, too.
        """
        if self.silent_s(now) > self.policy.silence_s or self.stuck:
            return False
        return self.age_s <= self.policy.step_floor_s or self.prefill_tokens > own_tokens

    def suspect(self, now: float) -> str:
        """Return the reason to consider the worker hung at `now`; empty if there is no such reason."""
        if not self.open_streams:
            return ""
        silent = self.silent_s(now)
        if silent > self.policy.silence_s:
            return f"no frame for {(now - self.heard_at) * 1000:.0f} ms"
        if self.stuck:
            return f"its engine's step is {self.age_s:.1f} s old, the limit is {self.step_limit_s():.1f} s"
        return ""
