"""The faults of one GPU: each change is reported once, whatever the driver reports and in any order."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers.devices.faults import (
    IDLE,
    QUIET_S,
    DeviceFaults,
    DeviceReading,
    FaultChange,
    Throttle,
    ThrottlePolicy,
    clock_weight,
    evolve,
)
from workers.devices.taxonomy import LEVELS, XID_CLASSES, XIDS

THERMAL = 0x20
POLICY = ThrottlePolicy()


def classes(changes: list[FaultChange]) -> list[tuple[str, bool]]:
    return [(change.fault_class, change.over) for change in changes]


def test_a_contained_error_is_fatal_to_the_worker_and_an_illegal_address_is_not() -> None:
    assert DeviceFaults().xid(94, 0.0)[0].fatal
    assert not DeviceFaults().xid(31, 0.0)[0].fatal
    assert DeviceFaults().xid(9999, 0.0) == [FaultChange(fault_class="xid_warning", code="9999")]


def test_an_xid_is_repaired_unless_another_of_its_class_has_occurred_since() -> None:
    faults = DeviceFaults()
    faults.xid(48, 0.0)
    faults.xid(43, 0.0)
    assert classes(faults.repair_xid(48)) == [("xid", True)] and faults.repair_xid(48) == []
    faults.xid(48, 0.0)
    faults.xid(79, 1.0)
    assert faults.repair_xid(48) == []
    assert {(change.fault_class, change.code) for change in faults.standing.values()} == {
        ("xid", "79"),
        ("xid_warning", "43"),
    }


def test_a_warning_ends_when_it_has_not_occurred_for_a_while() -> None:
    faults = DeviceFaults()
    faults.xid(43, 0.0)
    assert faults.xid(43, QUIET_S - 1) == []
    assert faults.read(DeviceReading(), (), QUIET_S) == []
    assert classes(faults.read(DeviceReading(), (), 2 * QUIET_S)) == [("xid_warning", True)]


def test_a_fatal_xid_is_active_until_a_reset_is_seen() -> None:
    faults = DeviceFaults()
    faults.read(DeviceReading(ecc=0, recovery=0), (), 0.0)
    faults.xid(48, 1.0)
    assert classes(faults.read(DeviceReading(ecc=1, recovery=1), (), 2.0)) == [
        ("ecc", False),
        ("recovery", False),
    ]
    assert faults.read(DeviceReading(ecc=1, recovery=1), (), 2 * QUIET_S) == []
    mended = classes(faults.read(DeviceReading(ecc=0, recovery=0), (), 3 * QUIET_S))
    assert sorted(mended) == [("ecc", True), ("recovery", True), ("xid", True)]
    assert faults.standing == {}


def test_a_link_that_was_never_up_is_not_reported_as_down() -> None:
    faults = DeviceFaults(linked=True)
    assert faults.read(DeviceReading(links=(True, False)), (), 0.0) == []
    (down,) = faults.read(DeviceReading(links=(False, False)), (), 1.0)
    assert down == FaultChange(fault_class="nvlink_down", code="0", weight=0.0)
    assert DeviceFaults(linked=False).xid(74, 0.0)[0].weight is None


def test_link_errors_are_reported_while_they_increase() -> None:
    faults = DeviceFaults()
    assert faults.read(DeviceReading(link_errors=(5, 7)), (), 0.0) == []
    assert (
        faults.read(DeviceReading(link_errors=(5, None)), (), 1.0) == []
    )  # a link that is down has no count
    assert faults.read(DeviceReading(link_errors=(5, 7)), (), 2.0) == []
    assert classes(faults.read(DeviceReading(link_errors=(6, 7)), (), 3.0)) == [("nvlink_errors", False)]
    assert faults.read(DeviceReading(link_errors=(6, 9)), (), 4.0) == []
    assert classes(faults.read(DeviceReading(link_errors=(6, 9)), (), 4.0 + QUIET_S)) == [
        ("nvlink_errors", True)
    ]


def test_an_idle_gpu_is_neither_slow_nor_badly_connected() -> None:
    faults = DeviceFaults()
    resting = DeviceReading(
        reasons=THERMAL | IDLE, clock=210, clock_max=2000, pcie_width=8, pcie_width_max=16
    )
    for second in range(60):
        assert faults.read(resting, (), float(second)) == []
    assert classes(faults.read(replace(resting, reasons=0), (), 60.0)) == [("pcie_width", False)]


def test_a_lost_gpu_keeps_its_faults() -> None:
    faults = DeviceFaults()
    faults.read(DeviceReading(remap_failed=True), (), 0.0)
    assert classes(faults.read(DeviceReading(lost=True), (), 1.0)) == [("lost", False)]
    assert set(faults.standing) == {"row_remap_failure", "lost"}


def test_a_hot_gpu_does_not_flap_between_hot_and_cool() -> None:
    faults = DeviceFaults()
    reported = [
        classes(faults.read(DeviceReading(temperature=t, slowdown=90), (), 0.0))
        for t in (89, 90, 89, 90, 86, 85, 84)
    ]
    assert [change for changes in reported for change in changes] == [
        ("temperature", False),
        ("temperature", True),
    ]


def throttled(clock: int, reasons: int = THERMAL) -> DeviceReading:
    return DeviceReading(reasons=reasons, clock=clock, clock_max=2000)


def test_throttling_is_reported_after_ten_seconds_and_in_steps_of_a_tenth() -> None:
    faults, reported = DeviceFaults(), []
    for second, clock in enumerate([1000] * 12 + [1080] * 3 + [1200] * 3 + [300] * 3):
        reported += faults.read(throttled(clock), (2000, 2000, 900), float(second))
    assert [change.weight for change in reported] == [0.5, 0.6, 0.15]
    for second in range(30, 45):
        reported += faults.read(throttled(2000, reasons=0), (2000,), float(second))
    assert classes(reported[3:]) == [("throttle", True)]


def test_a_short_dip_is_not_reported() -> None:
    faults = DeviceFaults()
    for second in range(60):
        assert faults.read(throttled(500, reasons=THERMAL if second % 9 else 0), (2000,), float(second)) == []


def test_a_clock_is_compared_with_its_peers_or_with_its_own_maximum() -> None:
    assert clock_weight(900, (1800, 1700, 1900), 2000) == 0.5
    assert clock_weight(900, (), 1800) == 0.5
    assert (clock_weight(10, (1800,), None), clock_weight(1900, (1800,), None)) == (0.1, 1.0)
    assert clock_weight(None, (1800,), 2000) is None and clock_weight(900, (), None) is None


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 1.0), st.floats(0.1, 5.0)), max_size=200))
def test_reported_weights_differ_by_the_dead_band_and_wait_for_the_hold_time(
    steps: list[tuple[bool, float, float]],
) -> None:
    state, now, changed_at, was = Throttle(), 0.0, 0.0, False
    for on, weight, passed_s in steps:
        now += passed_s
        changed_at, was = (now, on) if on != was else (changed_at, was)
        before, state = state, evolve(POLICY, state, on, weight, now)
        if state.reported != before.reported:
            assert now - changed_at >= POLICY.hold_s
            assert (state.reported is None) == (not on)
        if state.reported is not None and before.reported is not None:
            assert (
                state.reported == before.reported
                or abs(state.reported - before.reported) >= POLICY.dead_band - 1e-6
            )


maybe_int = st.none() | st.integers(0, 3)
READINGS = st.builds(
    DeviceReading, lost=st.booleans(), ecc=maybe_int, remap_pending=st.none() | st.booleans(),
    remap_failed=st.none() | st.booleans(), recovery=maybe_int, reasons=st.sampled_from((None, 0, 1, 4, 0x40, 0x80)),
    clock=st.sampled_from((None, 100, 1000, 2000)), clock_max=st.just(2000), temperature=st.sampled_from((None, 50, 88, 91)),
    slowdown=st.just(90), pcie_width=st.sampled_from((None, 8, 16)), pcie_width_max=st.just(16),
    links=st.sampled_from(((), (True, True), (True, False), (None, True))),
    link_errors=st.sampled_from(((), (1, 2), (2, 2), (None, 3))),
)  # fmt: skip


@given(st.lists(READINGS | st.sampled_from((*XIDS, 1, 9999)), max_size=60), st.booleans())
def test_each_change_is_reported_once_and_the_changes_add_up_to_the_active_faults(
    events: list[Any], linked: bool
) -> None:
    faults, known, now = DeviceFaults(linked), dict[str, FaultChange](), 0.0
    for event in events:
        now += 7.0
        seen = isinstance(event, DeviceReading)
        changes = faults.read(event, (2000,), now) if seen else faults.xid(event, now)
        for change in changes:
            assert change.fault_class in LEVELS or change.fault_class in XID_CLASSES.values()
            assert change.fatal <= (change.weight is None)
            if change.over:
                assert known.pop(change.fault_class).code == change.code
            else:
                assert known.get(change.fault_class) != change
                known[change.fault_class] = change
        assert known == faults.standing


@given(st.lists(READINGS | st.sampled_from((*XIDS, 9999, "restart")), max_size=60), st.booleans())
def test_each_life_reports_all_active_faults_once_its_gpu_was_read(events: list[Any], linked: bool) -> None:
    faults, known, now, looked = DeviceFaults(linked), dict[str, FaultChange](), 0.0, True
    for event in events:
        now += 7.0
        if event == "restart":
            before, faults = list(faults.standing.values()), DeviceFaults(linked)
            faults.restore(before, now)
            known, looked = {}, False
            continue
        seen = isinstance(event, DeviceReading)
        looked = looked or seen
        for change in faults.read(event, (2000,), now) if seen else faults.xid(event, now):
            if change.over:
                known.pop(change.fault_class, None)  # possibly a fault that only the previous life reported
            else:
                known[change.fault_class] = change
        assert known == faults.standing if looked else known.items() <= faults.standing.items()
