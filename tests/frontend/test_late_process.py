"""Workers of one late process fall silent together, which is no hang; a single silent one is hung."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.adapters.request_plane.hang import LATE_S_BORNE, HangDetector, HangPolicy, Process

POLICY = HangPolicy()
STEP_S = 0.02
# a process that was never late and is silent for longer counts as hung
STOPPED_S = POLICY.silence_s + LATE_S_BORNE
BEAT_S = 0.08


class WorkerProcess:
    """A process of workers with heartbeats from one loop, and a frontend with a stream at each. Time is virtual."""

    def __init__(self, workers: int = 4) -> None:
        self.process = Process(0.0)
        self.process.shared = workers > 1
        self.pulses = [HangDetector(POLICY, 0.0, self.process) for _ in range(workers)]
        for pulse in self.pulses:
            pulse.opened(0.0)
        self.now = 0.0
        self.hung: set[int] = set()
        self._due = [BEAT_S + number * BEAT_S / workers for number in range(workers)]

    def run(self, seconds: float) -> float | None:
        """Let time pass. Return after how long a worker was suspected, if one was."""
        return self._pass(seconds, late=False)

    def be_late(self, seconds: float) -> float | None:
        """Stop the process for this long."""
        return self._pass(seconds, late=True)

    def _pass(self, seconds: float, *, late: bool) -> float | None:
        began = self.now
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for number, pulse in enumerate(self.pulses):
                if not late and self.now >= self._due[number] and number not in self.hung:
                    pulse.frame_received(self.now)
                    self._due[number] = self.now + BEAT_S
            if self.suspects():
                return self.now - began
        return None

    def suspects(self) -> set[int]:
        return {number for number, pulse in enumerate(self.pulses) if pulse.suspect(self.now)}


def test_a_process_that_is_repeatedly_late_is_not_many_hung_workers() -> None:
    host = WorkerProcess()
    for late_s in (0.9, 0.5, 2.0, 1.5):
        assert host.be_late(late_s) is None
        assert host.run(0.3) is None


def test_a_process_that_was_never_late_and_stops_is_hung_within_a_second() -> None:
    host = WorkerProcess()
    assert host.run(1.0) is None
    assert host.be_late(5.0) == pytest.approx(STOPPED_S, abs=0.1)
    host.now += BEAT_S
    assert host.suspects() == {0, 1, 2, 3}


def test_a_process_that_stops_for_good_is_hung_however_late_it_was() -> None:
    host = WorkerProcess()
    for late_s in (0.3, 1.0, 2.0):
        host.be_late(late_s)
        host.run(0.3)
    found_s = host.be_late(10.0)
    assert found_s is not None
    assert found_s < POLICY.silence_s + POLICY.all_silent_s + 0.1


def test_past_lateness_of_a_process_is_forgotten() -> None:
    host = WorkerProcess()
    host.be_late(0.9)
    host.run(60.0)
    assert host.be_late(5.0) == pytest.approx(STOPPED_S, abs=0.1)


def test_a_worker_alone_in_its_process_is_judged_by_its_own_silence_only() -> None:
    alone = WorkerProcess(1)
    assert alone.be_late(0.35) is None
    alone.run(1.0)
    assert alone.be_late(5.0) == pytest.approx(POLICY.silence_s, abs=0.1)


@given(late=st.lists(st.tuples(st.floats(0.0, 0.85), st.floats(0.1, 0.6)), max_size=4))
def test_one_hung_worker_among_live_ones_is_found_within_the_lateness_of_its_process(
    late: list[tuple[float, float]],
) -> None:
    host = WorkerProcess()
    for late_s, after_s in late:
        assert host.be_late(late_s) is None
        assert host.run(after_s) is None
    host.hung = {2}
    found_s = host.run(2.0)
    assert found_s is not None
    assert found_s < POLICY.silence_s + 0.2
    assert host.suspects() == {2}


def test_lateness_of_our_own_loop_is_not_attributed_to_the_process() -> None:
    host = WorkerProcess()
    host.run(1.0)
    host.process.look_due = host.now + POLICY.tick_s
    host.now += 3.0  # we check only now, and everything has arrived meanwhile
    for pulse in host.pulses:
        pulse.frame_received(host.now)
    assert host.process.late_s <= POLICY.tick_s
    assert host.be_late(5.0) == pytest.approx(STOPPED_S, abs=0.1)


def test_an_idle_worker_with_a_beat_per_second_is_not_late() -> None:
    process = Process(0.0)
    process.shared = True
    idle, hung = HangDetector(POLICY, 0.0, process), HangDetector(POLICY, 0.0, process)
    for second in range(1, 4):
        idle.frame_received(second * 0.95)
    hung.opened(2.9)
    assert hung.suspect(3.29) == ""
    idle.frame_received(3.35)
    assert process.late_s == 0.0
    assert hung.suspect(3.37)


def test_the_last_worker_to_report_after_a_stop_of_its_process_is_not_hung() -> None:
    process = Process(0.0)
    process.shared = True
    first, last = HangDetector(POLICY, 0.0, process), HangDetector(POLICY, 0.0, process)
    for pulse in (first, last):
        pulse.opened(0.0)
    for now in (0.38, 0.46, 0.54):  # the process was stopped 0.28 s longer than its workers are silent
        first.frame_received(now)
        assert last.suspect(now) == ""
    for now in (0.62, 0.70):
        first.frame_received(now)
    assert last.suspect(0.7)
