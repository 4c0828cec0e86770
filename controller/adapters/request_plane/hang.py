"""Detects hung workers: a worker with open streams is silent, or its engine makes no progress.

    silence      a worker with open streams sends a frame at least every 100 ms from its loop, whatever its
                 engine does; 400 ms without any mean a hung process or a cut network
    stuck step   a live loop reports the age of the engine's step; the limit is a multiple of the recent step
                 time, with a floor, and an allowance for each prompt token of a prefill

Everything here is arithmetic on instants that are passed in. The lag of our own loop must be excluded: while this process did
not run, it read no frames, so the lag is added to every worker's time before any is judged. The recent step time is not
derived from the *beats'* ages: a stuck step would raise its own limit.

Workers of one process fall silent together while its loop is late: that is one late process, not several hung workers.

    A   | | | | |                | | | |        The lateness is known once one of its workers sends again, and is
    B    | | | | |                | | | |       subtracted from the others' silence. Until then, the process is allowed three
    C    | | | hung                             times its recent lateness, and at least 0.6 s. C was silent while the others
         ──────────  late  ───────────────▶     were sending: it is hung, and detected as fast as if it were alone.
"""

from dataclasses import dataclass
from math import inf

from events.wire import Beat

OWED_S = 0.1  # interval of frames of a worker with open streams of ours
OWED_IDLE_S = 1.0  # interval of frames of any other worker
LATE_S_MIN = 0.06  # lateness above which it is recorded: one tick of ours, and a margin
LATE_S_BORNE = 0.6  # tolerated lateness of a process without a history
LATE_FACTOR = 3.0
LATE_MEMORY_S = 30.0


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """The thresholds from which silence and slowness count as a hang."""

    silence_s: float = 0.4
    tick_s: float = 0.05
    lag_s: float = 0.02  # a tick later than this is a lag of our own loop
    step_factor: float = 10.0
    step_floor_s: float = 5.0  # a busy CPU can make a step take seconds
    prefill_s_per_token: float = 0.03
    all_silent_s: float = 2.0  # silence of all workers at once up to which it is attributed to us
    step_memory_s_max: float = 10.0


@dataclass(slots=True, eq=False)
class Process:
    """The lateness of one worker process, derived from its workers' frames. Without effect if it has a single worker."""

    _heard_at: float
    shared: bool = False  # whether more than one worker runs in it: see `house`
    late_s: float = 0.0  # total time in which all workers owed a frame and none sent one
    look_due: float = inf  # our next look: time beyond it is our own loop's lag
    _worst_s: float = 0.0  # the longest recent lateness
    _late_at: float = -inf  # time of the longest recent lateness

    def house(self, workers: int) -> None:
        """Set the number of workers in this process."""
        self.shared = workers > 1

    def hear(self, owed_at: float, now: float) -> None:
        """Record a frame from a worker of this process that was due since `owed_at`."""
        heard_at = min(now, self.look_due)
        late_s = heard_at - max(owed_at, self._heard_at)
        if late_s > 0:
            self.late_s += late_s
            if late_s > LATE_S_MIN and (late_s >= self._worst_s or now - self._late_at > LATE_MEMORY_S):
                self._worst_s, self._late_at = late_s, now
        self._heard_at = now

    def excuse(self, lag_s: float, now: float) -> None:
        """Exclude a standstill of our own loop for `lag_s`."""
        self._heard_at = min(now, self._heard_at + lag_s)

    def excused_s(self, now: float, most_s: float) -> float:
        """Return the part of the current silence that may be due to lateness of the whole process: at most `most_s`."""
        if not self.shared:
            return 0.0
        worst_s = self._worst_s if now - self._late_at <= LATE_MEMORY_S else 0.0
        return min(now - self._heard_at, max(LATE_S_BORNE, LATE_FACTOR * worst_s), most_s)


@dataclass(slots=True, eq=False)
class HangDetector:
    """The hang detector of one connection."""

    policy: HangPolicy
    heard_at: float
    process: Process
    age_s: float = 0.0
    phase: str = "idle"
    prefill_tokens: int = 0
    open_streams: int = 0
    _late_s: float = 0.0  # the process's `late_s` at this worker's last frame
    _recent_s: float = 0.0  # the slowest recent step, decaying
    _stepped_at: float | None = None

    def __post_init__(self) -> None:
        self._late_s = self.process.late_s

    def opened(self, now: float) -> None:
        """Record the opening of a stream. Silence counts from the opening of the first one."""
        if not self.open_streams:
            self.heard_at = max(self.heard_at, now)
            self._late_s = self.process.late_s
            self._stepped_at = None
        self.open_streams += 1

    def hear(self, now: float) -> None:
        """Record a frame of any kind."""
        if self.process.shared:
            self.process.hear(self.heard_at + (OWED_S if self.open_streams else OWED_IDLE_S), now)
            self._late_s = self.process.late_s
        self.heard_at = now

    def closed(self) -> None:
        """Record the end of a stream."""
        self.open_streams -= 1

    def stepped(self, now: float, steps: int = 1) -> None:
        """Record the output of `steps` steps that arrived together: the engine makes progress."""
        if self._stepped_at is not None:
            took = min(now - self._stepped_at, self.policy.step_memory_s_max)
            self._recent_s = max(took, self._recent_s * 0.98)
        self._recent_s *= 0.98 ** (steps - 1)
        self._stepped_at = now
        self.age_s = 0.0

    def beat(self, beat: Beat) -> None:
        """Record the engine's state as the worker's loop reports it."""
        self.age_s = 0.0 if beat.phase == "idle" else beat.step_age_ms / 1000
        self.phase = beat.phase
        self.prefill_tokens = beat.prefill_tokens

    def excuse(self, lag_s: float, now: float) -> None:
        """Exclude a standstill of our own loop for `lag_s`: no frame could be read during that time."""
        self.heard_at = min(now, self.heard_at + lag_s)

    def silent_s(self, now: float) -> float:
        """Return the worker's silence, without its process's lateness; 0 when no frame is owed."""
        if not self.open_streams:
            return 0.0
        process = self.process
        late_s = process.late_s - self._late_s + process.excused_s(now, self.policy.all_silent_s)
        return now - self.heard_at - late_s

    def step_limit_s(self) -> float:
        """Return the maximum age of the current step."""
        policy = self.policy
        usual = max(policy.step_floor_s, policy.step_factor * self._recent_s)
        return usual + policy.prefill_s_per_token * self.prefill_tokens

    @property
    def stuck(self) -> bool:
        """Whether the engine's step is older than the limit."""
        return self.age_s > self.policy.step_floor_s and self.age_s > self.step_limit_s()

    def gets_on(self, now: float, own_tokens: int) -> bool:
        """Whether the engine is known to make progress: its step is young, or old because of another request's prompt, longer
        than our `own_tokens` tokens."""
        if self.silent_s(now) > self.policy.silence_s or self.stuck:
            return False
        return self.age_s <= self.policy.step_floor_s or self.prefill_tokens > own_tokens

    def suspect(self, now: float) -> str:
        """Return what is wrong with this worker; empty if nothing is."""
        if not self.open_streams:
            return ""
        silent = self.silent_s(now)
        if silent > self.policy.silence_s:
            return f"no frame for {(now - self.heard_at) * 1000:.0f} ms"
        if self.stuck:
            return f"its engine's step is {self.age_s:.1f} s old, the limit is {self.step_limit_s():.1f} s"
        return ""
