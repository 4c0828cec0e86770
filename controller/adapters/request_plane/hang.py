"""Is this worker hung? It has streams of ours open and says nothing, or its engine does not get on.

    silence      a worker with open streams sends a frame at least every 100 ms from its loop, whatever its
                 engine does; 400 ms without any is a hung process or a cut network
    stuck step   a live loop reports how old the engine's step is; the limit is a multiple of the recent step
                 time, with a floor, and an allowance for each prompt token of a prefill

All of it is arithmetic on instants that are passed in. Our own loop's lag is the thing one would get wrong:
while this process did not run, nobody could be heard, so the lag is added to everyone's time before anyone is
judged. A multiple of the *beats'* ages is not taken as the recent step time: a stuck step would raise its own
limit.

Workers that share a process fall silent together while its loop is late: that is one late process, not so many hung workers.

    A   | | | | |                | | | |        what it was late is known once one of its workers speaks again, and is taken
    B    | | | | |                | | | |       off the others' silence; while nobody speaks yet, it is given three times what
    C    | | | hung                             it was late lately, and 0.6 s at least. C was silent while the others spoke:
         ──────────  late  ───────────────▶     it is hung, as soon as if it were alone.
"""

from dataclasses import dataclass
from math import inf

from events.wire import Beat

OWED_S = 0.1  # a worker with streams of ours open says something as often as that
OWED_IDLE_S = 1.0  # and any other as often as that
LATE_S_MIN = 0.06  # how much more than that is remembered: a tick of ours, and a little
LATE_S_BORNE = 0.6  # of a process of which nothing is known yet
LATE_FACTOR = 3.0
LATE_MEMORY_S = 30.0


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """When silence and slowness become a hang."""

    silence_s: float = 0.4
    tick_s: float = 0.05
    lag_s: float = 0.02  # a tick that comes later than this was our own loop's fault
    step_factor: float = 10.0
    step_floor_s: float = 5.0  # a busy CPU makes a step of seconds now and then
    prefill_s_per_token: float = 0.03
    everyone_s: float = 2.0  # how long all workers at once may be silent before it is not our own fault
    step_memory_s_max: float = 10.0


class Process:
    """What all workers of one process have let us hear together. Of a worker that has a process of its own, nothing follows."""

    __slots__ = ("_heard_at", "_late_at", "_worst_s", "late_s", "look_due", "shared")

    def __init__(self, now: float) -> None:
        self.shared = False  # by more than one worker: see `house`
        self.late_s = 0.0  # for how long, all in all, everybody owed us something and nobody spoke
        self.look_due = inf  # when we look next: time beyond it is our own loop's lag
        self._heard_at = now
        self._worst_s = 0.0  # the longest lateness lately
        self._late_at = -inf  # when that was

    def house(self, workers: int) -> None:
        """So many workers live here."""
        self.shared = workers > 1

    def hear(self, owed_at: float, now: float) -> None:
        """A worker speaks that owed us something since `owed_at`."""
        heard_at = min(now, self.look_due)
        late_s = heard_at - max(owed_at, self._heard_at)
        if late_s > 0:
            self.late_s += late_s
            if late_s > LATE_S_MIN and (late_s >= self._worst_s or now - self._late_at > LATE_MEMORY_S):
                self._worst_s, self._late_at = late_s, now
        self._heard_at = now

    def excuse(self, lag_s: float, now: float) -> None:
        """Our own loop stood still for `lag_s`."""
        self._heard_at = min(now, self._heard_at + lag_s)

    def excused_s(self, now: float, most_s: float) -> float:
        """Return how much of a silence until now is the whole process's, and may be mere lateness: at most `most_s`."""
        if not self.shared:
            return 0.0
        worst_s = self._worst_s if now - self._late_at <= LATE_MEMORY_S else 0.0
        return min(now - self._heard_at, max(LATE_S_BORNE, LATE_FACTOR * worst_s), most_s)


class HangDetector:
    """What one connection has let us hear."""

    __slots__ = (
        "_late_s",
        "_policy",
        "_process",
        "_recent_s",
        "_stepped_at",
        "age_s",
        "heard_at",
        "open_streams",
        "phase",
        "prefill_tokens",
    )

    def __init__(self, policy: HangPolicy, now: float, process: Process | None = None) -> None:
        self._policy = policy
        self._process = process or Process(now)
        self._late_s = self._process.late_s  # of its process, when this worker was heard last
        self._recent_s = 0.0  # the slowest step lately, decaying
        self._stepped_at: float | None = None
        self.heard_at = now
        self.age_s = 0.0
        self.phase = "idle"
        self.prefill_tokens = 0
        self.open_streams = 0

    def opened(self, now: float) -> None:
        """A stream was opened. With the first one, silence begins to count."""
        if not self.open_streams:
            self.heard_at = max(self.heard_at, now)
            self._late_s = self._process.late_s
            self._stepped_at = None
        self.open_streams += 1

    def hear(self, now: float) -> None:
        """The worker has said something, whatever it is."""
        if self._process.shared:
            self._process.hear(self.heard_at + (OWED_S if self.open_streams else OWED_IDLE_S), now)
            self._late_s = self._process.late_s
        self.heard_at = now

    def closed(self) -> None:
        """A stream ended."""
        self.open_streams -= 1

    def stepped(self, now: float, steps: int = 1) -> None:
        """The output of so many steps came at once: the engine gets on."""
        if self._stepped_at is not None:
            took = min(now - self._stepped_at, self._policy.step_memory_s_max)
            self._recent_s = max(took, self._recent_s * 0.98)
        self._recent_s *= 0.98 ** (steps - 1)
        self._stepped_at = now
        self.age_s = 0.0

    def beat(self, beat: Beat) -> None:
        """The worker's loop said how its engine does."""
        self.age_s = 0.0 if beat.phase == "idle" else beat.step_age_ms / 1000
        self.phase = beat.phase
        self.prefill_tokens = beat.prefill_tokens

    def excuse(self, lag_s: float, now: float) -> None:
        """Our own loop stood still for `lag_s`: nobody could be heard meanwhile."""
        self.heard_at = min(now, self.heard_at + lag_s)

    def silent_s(self, now: float) -> float:
        """Return for how long this worker has been silent and its process was not late; 0 when no frame is owed."""
        if not self.open_streams:
            return 0.0
        process = self._process
        late_s = process.late_s - self._late_s + process.excused_s(now, self._policy.everyone_s)
        return now - self.heard_at - late_s

    def step_limit_s(self) -> float:
        """Return how old the current step may get."""
        policy = self._policy
        usual = max(policy.step_floor_s, policy.step_factor * self._recent_s)
        return usual + policy.prefill_s_per_token * self.prefill_tokens

    @property
    def stuck(self) -> bool:
        """Whether the engine's step is older than any step should get."""
        return self.age_s > self._policy.step_floor_s and self.age_s > self.step_limit_s()

    def gets_on(self, now: float, own_tokens: int) -> bool:
        """Whether the engine is known to get on: its step is young, or old because of a prompt that is not of our own
        `own_tokens` tokens."""
        if self.silent_s(now) > self._policy.silence_s or self.stuck:
            return False
        return self.age_s <= self._policy.step_floor_s or self.prefill_tokens > own_tokens

    def suspect(self, now: float) -> str:
        """Return what is wrong with this worker, or nothing."""
        if not self.open_streams:
            return ""
        silent = self.silent_s(now)
        if silent > self._policy.silence_s:
            return f"no frame for {(now - self.heard_at) * 1000:.0f} ms"
        if self.stuck:
            return f"its engine's step is {self.age_s:.1f} s old, the limit is {self.step_limit_s():.1f} s"
        return ""
