"""Workers that share a process fall silent together while it is late: that is no hang. One of them alone is hung, as ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.adapters.request_plane.hang import LATE_S_BORNE, HangDetector, HangPolicy, Process

POLICY = HangPolicy()
STEP_S = 0.02
STOPPED_S = POLICY.silence_s + LATE_S_BORNE  # after so long a process that never was late counts as hung
BEAT_S = 0.08


class House:
    """A process of workers that beat from one loop, and a frontend with a stream at each. Time is counted, not spent."""

    def __init__(self, workers: int = 4) -> None:
        self.process = Process(0.0)
        self.process.shared = workers > 1
        self.pulses = [HangDetector(POLICY, 0.0, self.process) for _ in range(workers)]
        for pulse in self.pulses:
            pulse.opened(0.0)
        self.now = 0.0
        self.hung: set[int] = set()
        self._due = [BEAT_S + number * BEAT_S / workers for number in range(workers)]

    def go_on(self, seconds: float) -> float | None:
        """Let time pass; return for how long, where somebody was suspected before it was over."""
        return self._pass(seconds, late=False)

    def be_late(self, seconds: float) -> float | None:
        """Let the process stand still for so long."""
        return self._pass(seconds, late=True)

    def _pass(self, seconds: float, *, late: bool) -> float | None:
        began = self.now
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for number, pulse in enumerate(self.pulses):
                if not late and self.now >= self._due[number] and number not in self.hung:
                    pulse.hear(self.now)
                    self._due[number] = self.now + BEAT_S
            if self.suspects():
                return self.now - began
        return None

    def suspects(self) -> set[int]:
        return {number for number, pulse in enumerate(self.pulses) if pulse.suspect(self.now)}


def test_a_process_that_is_late_again_and_again_is_not_so_many_hung_workers() -> None:
    house = House()
    for late_s in (0.9, 0.5, 2.0, 1.5):
        assert house.be_late(late_s) is None
        assert house.go_on(0.3) is None


def test_a_process_that_never_was_late_and_stops_is_hung_within_a_second() -> None:
    house = House()
    assert house.go_on(1.0) is None
    assert house.be_late(5.0) == pytest.approx(STOPPED_S, abs=0.1)
    house.now += BEAT_S
    assert house.suspects() == {0, 1, 2, 3}


def test_a_process_that_stops_for_good_is_hung_however_late_it_was() -> None:
    house = House()
    for late_s in (0.3, 1.0, 2.0):
        house.be_late(late_s)
        house.go_on(0.3)
    found_s = house.be_late(10.0)
    assert found_s is not None
    assert found_s < POLICY.silence_s + POLICY.all_silent_s + 0.1


def test_what_a_process_was_late_is_forgotten() -> None:
    house = House()
    house.be_late(0.9)
    house.go_on(60.0)
    assert house.be_late(5.0) == pytest.approx(STOPPED_S, abs=0.1)


def test_a_worker_that_is_alone_is_judged_by_its_own_silence_only() -> None:
    alone = House(1)
    assert alone.be_late(0.35) is None
    alone.go_on(1.0)
    assert alone.be_late(5.0) == pytest.approx(POLICY.silence_s, abs=0.1)


@given(late=st.lists(st.tuples(st.floats(0.0, 0.85), st.floats(0.1, 0.6)), max_size=4))
def test_one_that_hangs_among_others_that_speak_is_found_in_the_time_that_its_process_was_not_late(
    late: list[tuple[float, float]],
) -> None:
    house = House()
    for late_s, after_s in late:
        assert house.be_late(late_s) is None
        assert house.go_on(after_s) is None
    house.hung = {2}
    found_s = house.go_on(2.0)
    assert found_s is not None
    assert found_s < POLICY.silence_s + 0.2
    assert house.suspects() == {2}


def test_what_our_own_loop_was_late_is_not_the_processs_lateness() -> None:
    house = House()
    house.go_on(1.0)
    house.process.look_due = house.now + POLICY.tick_s
    house.now += 3.0  # we look only now, and all has arrived meanwhile
    for pulse in house.pulses:
        pulse.hear(house.now)
    assert house.process.late_s <= POLICY.tick_s
    assert house.be_late(5.0) == pytest.approx(STOPPED_S, abs=0.1)


def test_an_idle_workers_beat_each_second_is_not_late() -> None:
    process = Process(0.0)
    process.shared = True
    idle, hung = HangDetector(POLICY, 0.0, process), HangDetector(POLICY, 0.0, process)
    for second in range(1, 4):
        idle.hear(second * 0.95)
    hung.opened(2.9)
    assert hung.suspect(3.29) == ""
    idle.hear(3.35)
    assert process.late_s == 0.0
    assert hung.suspect(3.37)


def test_one_whose_turn_comes_last_once_its_process_goes_on_is_not_hung() -> None:
    process = Process(0.0)
    process.shared = True
    first, last = HangDetector(POLICY, 0.0, process), HangDetector(POLICY, 0.0, process)
    for pulse in (first, last):
        pulse.opened(0.0)
    for now in (0.38, 0.46, 0.54):  # it stood still for 0.28 s longer than its workers are silent
        first.hear(now)
        assert last.suspect(now) == ""
    for now in (0.62, 0.70):
        first.hear(now)
    assert last.suspect(0.7)
