"""A simulated fleet of one model in virtual time, for experiments that would take days in real time.

    a request ─▶ the worker that can start it first ─▶ prefill of the prompt ("reading") ─▶ a slot in the batch ─▶ tokens

A worker prefills one prompt after another, and requests queue at workers without limit. A decoding step takes longer if
more sequences run, or if the worker prefills a prompt at the same time. A request counts as missed if its first token, or
its further tokens, are later than the objectives allow.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp

import numpy as np

from controller.deciders.capacity import tpot_ms
from controller.planner.sizing import BUSY_MAX, Objectives
from events.observations import Profile

REMEMBERS_S = 10.0  # averaging time of the share of a worker's time spent reading
ALL_REMEMBERS_S = 60.0  # the same for the whole fleet
GONE = 1e18
ROOM = 64  # initial array size, in workers


@dataclass(slots=True)
class DayFigures:
    """The results of a simulated day."""

    requests: int = 0
    missed: int = 0  # with a late first token or late tokens
    late_first: int = 0
    late_tokens: int = 0
    worker_s: float = 0.0  # worker-seconds, from the start of each worker
    changes: int = 0
    most: int = 0

    @property
    def missed_share(self) -> float:
        """The share of requests with a late first token or late further tokens, 0 to 1."""
        return self.missed / self.requests if self.requests else 0.0


class FleetModel:
    """The simulated workers of one model. Times are in seconds. Requests must arrive in order of time."""

    def __init__(self, profile: Profile, objectives: Objectives, workers: int, start_s: float) -> None:
        """Create a fleet with `workers` ready workers. A worker that is added later serves after `start_s` seconds."""
        self._profile = profile
        self._objectives = objectives
        self._start_s = start_s
        self._free_at = np.full(ROOM, GONE)  # when each has read its prompts; GONE: gets no requests
        self._running = np.zeros(ROOM, dtype=np.int64)
        self._reading = np.zeros(ROOM)  # share of its time spent reading, when last updated
        self._looked_at = np.zeros(ROOM)
        self._all_reading, self._last_at = 0.0, 0.0  # of the whole fleet
        self._ends: list[tuple[float, int]] = []
        self._ends_of: dict[int, list[float]] = {}  # end times of each worker's answers
        self._ready: list[tuple[float, int]] = []  # workers that are starting
        self._there: dict[int, float] = {}  # start time of each worker
        self._idle = list(range(ROOM - 1, -1, -1))
        self._leaving: set[int] = set()
        self._late: list[float] = []  # times at which an answer was found to be late
        self.figures = DayFigures()
        self._tpot = [tpot_ms(profile, n) / 1000 for n in range(profile.max_batch + 1)]
        for _ in range(workers):
            index = self._take(0.0)  # first, because it may replace the array
            self._free_at[index] = 0.0

    @property
    def workers(self) -> int:
        """The number of workers that serve or are starting. Draining workers are not counted."""
        return len(self._there) - len(self._leaving)

    def _take(self, now: float) -> int:
        if not self._idle:
            self._grow()
        index = self._idle.pop()
        self._there[index] = now
        self.figures.most = max(self.figures.most, self.workers)
        return index

    def _grow(self) -> None:
        """Double the number of workers for which the arrays have room."""
        there = len(self._running)
        self._free_at = np.append(self._free_at, np.full(there, GONE))
        self._running = np.append(self._running, np.zeros(there, dtype=np.int64))
        self._reading = np.append(self._reading, np.zeros(there))
        self._looked_at = np.append(self._looked_at, np.zeros(there))
        self._idle = list(range(2 * there - 1, there - 1, -1))

    def scale(self, workers: int, now: float) -> None:
        """Start or drain workers at time `now`, so that `workers` workers serve or are starting."""
        self._pass(now)
        if workers != self.workers:
            self.figures.changes += 1
        for _ in range(workers - self.workers):
            heappush(self._ready, (now + self._start_s, self._take(now)))
        starting = {index for _, index in self._ready}
        for _ in range(self.workers - workers):
            serving = [n for n in self._there if n not in self._leaving]
            leaves = min(serving, key=lambda n: (n not in starting, self._running[n]))
            if leaves in starting:
                self._ready = [one for one in self._ready if one[1] != leaves]
                self._gone(leaves, now)
                continue
            self._leaving.add(leaves)
            busy_until = max(now, float(self._free_at[leaves]))
            self._free_at[leaves] = GONE
            heappush(self._ends, (busy_until, -1 - leaves))

    def _gone(self, index: int, now: float) -> None:
        self.figures.worker_s += now - self._there.pop(index)
        self._leaving.discard(index)
        self._idle.append(index)

    def _pass(self, now: float) -> None:
        """Apply what is due by `now`: starts of workers, ends of answers, and removals of drained workers."""
        while self._ready and self._ready[0][0] <= now:
            at, index = heappop(self._ready)
            self._free_at[index] = at
        ends = self._ends
        while ends and ends[0][0] <= now:
            at, index = heappop(ends)
            if index >= 0:
                self._running[index] -= 1
                heappop(self._ends_of[index])
            else:
                index = -1 - index
            if index in self._leaving and self._running[index] == 0:
                self._gone(index, at)

    def come(self, now: float, prompt: int, answer: int) -> None:
        """Assign a request that arrives at `now` to the worker that can start it first.

        `prompt` and `answer` are numbers of tokens.
        """
        self._pass(now)
        begins = np.maximum(self._free_at, now)
        full = self._running >= self._profile.max_batch
        if full.any():
            begins = np.where(full & (begins < GONE), begins + 60.0, begins)
        index = int(np.argmin(begins + self._running * 1e-6))
        reading_s = prompt / self._profile.prefill_tokens_per_s
        begin = max(now, float(self._free_at[index]))
        if self._running[index] >= self._profile.max_batch:
            begin = max(begin, min(self._ends_of.get(index, ()), default=0.0))
        first = begin + reading_s
        kept = exp((float(self._looked_at[index]) - now) / REMEMBERS_S)
        share = float(self._reading[index]) * kept
        # Its own prompt is read before its tokens.
        self._reading[index] = min(BUSY_MAX, share + reading_s / REMEMBERS_S)
        self._looked_at[index] = now
        running = min(int(self._running[index]) + 1, self._profile.max_batch)
        tpot_s = self._tpot[running]
        token_s = tpot_s / (1 - self._while_it_lasts(now, share, answer * tpot_s, reading_s))
        self._free_at[index] = first
        self._running[index] += 1
        end = first + answer * token_s
        heappush(self._ends, (end, index))
        heappush(self._ends_of.setdefault(index, []), end)
        late_first = first + tpot_s - now > self._objectives.ttft_of_s(reading_s)
        late_tokens = answer > 1 and token_s * 1000 > self._objectives.tpot_ms
        figures = self.figures
        figures.requests += 1
        figures.late_first += late_first
        figures.late_tokens += late_tokens
        figures.missed += late_first or late_tokens
        if late_first or late_tokens:
            heappush(self._late, first if late_first else end)

    def _while_it_lasts(self, now: float, share: float, answer_s: float, reading_s: float) -> float:
        """Return the expected share of time that a worker spends on prefill while it generates an answer.

        The answer takes `answer_s` seconds. The result is a weighted mean of the worker's present share (`share`) and the
        fleet's average share. The longer the answer, the greater the weight of the fleet's average. `reading_s` is the prefill
        time of the request's own prompt. This time does not affect the result, but it raises the fleet's average for later calls.
        """
        self._all_reading *= exp((self._last_at - now) / ALL_REMEMBERS_S)
        usual = min(BUSY_MAX, self._all_reading / max(1, self.serving))
        self._all_reading += reading_s / ALL_REMEMBERS_S
        self._last_at = now
        later = answer_s / (answer_s + REMEMBERS_S)
        return (1 - later) * share + later * usual

    @property
    def serving(self) -> int:
        """The number of workers that serve now."""
        return self.workers - len(self._ready)

    def late_until(self, now: float) -> int:
        """Return the number of answers that have become late since the last call, up to the time `now`."""
        count = 0
        while self._late and self._late[0] <= now:
            heappop(self._late)
            count += 1
        return count

    def end(self, now: float) -> DayFigures:
        """End the simulated day at `now`, and return its results."""
        self._pass(now)
        for since in self._there.values():
            self.figures.worker_s += now - since
        self._there.clear()
        return self.figures
