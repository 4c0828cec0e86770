"""Derives the fault changes of one GPU from its readings and Xids (the driver's error events).

Each change is reported once. A change is the beginning or the end of a fault, or a new code or weight of an active fault. A
value that cannot be read changes nothing. A GPU that is lost keeps its other faults, because their end cannot be observed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from workers.devices.taxonomy import LEVELS, XID_CLASSES, Action, xid_meaning

WEIGHT_MIN = 0.1  # a slow worker still gets some traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottlePolicy:
    """How long a clock must be throttled, and how much the weight must change, before a fault is reported."""

    hold_s: float = 10.0  # seconds for which a GPU must (not) be throttled before a fault begins (ends)
    dead_band: float = 0.1  # minimum change of the weight that is reported; the full weight is 1


@dataclass(frozen=True, slots=True)
class Throttle:
    """The throttling state of one GPU. Times are in seconds, by time.monotonic().

        calm ── throttled for hold_s ──▶ reported (weight) ── a step of dead_band ──▶ reported (another weight)
          ▲                                    └── not throttled for hold_s ──▶ cleared ─┐
          └──────────────────────────────────────────────────────────────────────────────┘

    The weight is the worker's share of its normal traffic: clamp(clock / median of the peers' clocks, 0.1, 1). Clocks are in
    MHz, and peers are the other GPUs of the same model on this host. The hold time filters out short dips, which are normal.
    The dead band filters out small changes of the weight, which would move traffic back and forth.
    """

    throttled: bool = False
    since: float = 0.0  # when `throttled` last changed
    reported: float | None = None  # the last reported weight; None: no throttling is reported


def clock_weight(clock: int | None, peers: Sequence[int], clock_max: int | None) -> float | None:
    """Return a GPU's clock divided by the median of its peers' clocks, at least 0.1 and at most 1.

    Clocks are in MHz. Without peers, the reference is the maximum clock. Return None if the clock or the reference is unknown.
    """
    reference = median(peers) if peers else clock_max
    if clock is None or not reference:
        return None
    return round(min(1.0, max(WEIGHT_MIN, clock / reference)), 2)


def evolve(
    policy: ThrottlePolicy, state: Throttle, throttled: bool, weight: float | None, now: float
) -> Throttle:
    """Return the throttling state after a reading at the time `now`. `weight` is the result of `clock_weight`."""
    if throttled != state.throttled:
        return replace(state, throttled=throttled, since=now)
    if now - state.since < policy.hold_s:
        return state
    if not throttled:
        return replace(state, reported=None)
    if (
        weight is None
        or abs(weight - (1.0 if state.reported is None else state.reported)) < policy.dead_band - 1e-9
    ):
        return state
    return replace(state, reported=weight)


QUIET_S = 300.0  # a warning ends this many seconds after the last Xid or link error that caused it
COOL_BY_C = 5  # °C below the slowdown limit at which a hot GPU counts as cool again

THERMAL = 0x20 | 0x40  # clock-event reasons: software and hardware thermal slowdown
POWER_BRAKE = 0x80 | 0x08  # power brake by the supply; a hardware slowdown without a reported cause
IDLE = 0x01
REPAIRED_BY_RESET = frozenset(("xid", "xid_nvlink", "ecc"))  # faults that a reset repairs
RESETS = {1: "gpu_reset", 2: "node_reboot", 4: "drain_and_reset", 6: "bus_reset", 7: "system_reboot"}
"""The driver's recovery actions that end with a reset. Action 3, draining peer-to-peer traffic, is reported as an NVLink
fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """The values read from one GPU at one time. A value that the GPU does not report is None."""

    lost: bool = False
    ecc: int | None = None  # uncorrectable volatile ECC errors, counted since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery: int | None = None  # the recovery action recommended by the driver; 0: none
    reasons: int | None = None  # clock-event reasons, as bits
    clock: int | None = None  # clock of the streaming multiprocessors, in MHz
    clock_max: int | None = None  # in MHz
    temperature: int | None = None  # °C
    slowdown: int | None = None  # °C at which the GPU slows itself down
    margin: int | None = None  # °C below `slowdown`, for GPUs that report only this margin (Ada and later)
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    links: tuple[bool | None, ...] = ()  # state of each NVLink: up or down
    link_errors: tuple[int | None, ...] = ()  # replays and recoveries of each link so far

    @property
    def throttled(self) -> str:
        """The cause of reduced clocks, "thermal" or "power_brake"; empty if neither heat nor the power supply reduces them."""
        reasons = self.reasons or 0
        return "thermal" if reasons & THERMAL else "power_brake" if reasons & POWER_BRAKE else ""

    @property
    def until_slow(self) -> int | None:
        """The margin in °C until the GPU slows itself down; None if unknown."""
        if self.temperature is None or not self.slowdown:
            return self.margin
        return self.slowdown - self.temperature

    @property
    def idle(self) -> bool:
        """Whether the GPU is idle. The clock of an idle GPU does not show whether the GPU is throttled."""
        return bool((self.reasons or 0) & IDLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultChange:
    """One change of one fault: the fault has begun, has a new code or weight, or is over."""

    fault_class: str
    code: str = ""
    fatal: bool = False
    # the share of traffic that the worker keeps; None: all traffic, or no traffic if the fault is fatal
    weight: float | None = None
    over: bool = False
    found: bool = field(default=False, compare=False)  # whether the fault was present before the watch began


OnFaultChange = Callable[[str, FaultChange], None]
"""Called with a device's UUID and a change of one of its faults. The call may come from another thread than the event loop's."""


class DeviceFaults:
    """Tracks the active faults of one GPU. `linked` is true if the worker has several GPUs and needs their NVLinks."""

    def __init__(self, linked: bool = False, policy: ThrottlePolicy | None = None) -> None:
        self.linked = linked
        self.standing: dict[str, FaultChange] = {}
        self._policy = policy or ThrottlePolicy()
        self._throttle = Throttle()
        self._last_xid_at: dict[str, float] = {}  # Xid class -> time of the last one
        self._last: DeviceReading | None = None  # the last reading that was not a loss
        self._ecc = 0  # errors before the watch began, or before the last repair
        self._up: set[int] = set()  # links that have ever been up
        self._grew_at = float("-inf")  # when link errors last increased
        self._restored: set[str] = set()  # active fault classes that only the previous watch has seen
        self._unread = True  # no reading yet

    def restore(self, changes: Iterable[FaultChange], now: float) -> None:
        """Start with the faults in `changes`, which were active when the previous device watch ended.

        Faults that no longer exist are ended at the first reading. `now` is the current time.monotonic().
        """
        for change in changes:
            self.standing[change.fault_class] = change
            self._restored.add(change.fault_class)
            match change.fault_class:
                case "xid_warning":
                    self._last_xid_at[change.fault_class] = now
                case "nvlink_errors":
                    self._grew_at = now
                case "nvlink_down":
                    self._up |= {int(number) for number in change.code.split(",") if number.isdecimal()}
                case "throttle":
                    self._throttle = Throttle(throttled=True, since=now, reported=change.weight)

    def xid(self, code: int, now: float) -> list[FaultChange]:
        """Apply an Xid that was reported at `now`, and return the fault changes."""
        action = xid_meaning(code).action
        fault_class = XID_CLASSES[action]
        self._last_xid_at[fault_class] = now
        if fault_class in self._restored:  # a new Xid must be reported even if it equals the restored fault
            self._restored.discard(fault_class)
            del self.standing[fault_class]
        return list(self._fault(fault_class, action, str(code)))

    def repaired(self) -> list[FaultChange]:
        """End all faults after a replacement or reset of the device, and return the changes."""
        return [change for fault_class in list(self.standing) for change in self._over(fault_class)]

    def repair_xid(self, code: int) -> list[FaultChange]:
        """End the fault of the Xid `code`, and return the change. If a later Xid has replaced the fault, return no change."""
        fault_class = XID_CLASSES[xid_meaning(code).action]
        active = self.standing.get(fault_class)
        return list(self._over(fault_class)) if active is not None and active.code == str(code) else []

    def read(self, reading: DeviceReading, peers: tuple[int, ...], now: float) -> list[FaultChange]:
        """Apply a reading made at `now`, and return the fault changes.

        `peers` are the clocks in MHz of busy GPUs of the same model that are not throttled.
        """
        first, first_of_watch, self._unread = self._last is None, self._unread, False
        changes = list(self._check_restored(reading)) if first_of_watch and not reading.lost else []
        changes += self._read(reading, peers, now)
        if first_of_watch:  # also report the restored faults that are still active, for this worker instance
            changes += [fault for name, fault in self.standing.items() if name in self._restored]
        return [replace(change, found=True) for change in changes] if first else changes

    def _check_restored(self, new: DeviceReading) -> Iterator[FaultChange]:
        """End the restored faults that a reset repairs, if the driver no longer recommends a recovery action.

        If this driver cannot report recommendations, it is unknown whether a restored fault is over. The fault is then dropped
        without a report. If the GPU still computes wrongly after that, only canaries detect the wrong results.
        """
        for fault_class in sorted(REPAIRED_BY_RESET & self._restored):
            if new.recovery is None:
                self._restored.discard(fault_class)
                del self.standing[fault_class]
            elif new.recovery == 0:
                yield from self._over(fault_class)

    def _read(self, reading: DeviceReading, peers: tuple[int, ...], now: float) -> list[FaultChange]:
        if reading.lost:
            return list(self._fault("lost", "fatal", ""))
        changes = list(self._repaired(reading)) if self._repair_seen(reading) else []
        for fault_class, code in self._levels(reading, now):
            action = LEVELS[fault_class].action
            changes += self._fault(fault_class, action, code) if code is not None else self._over(fault_class)
        changes += self._throttling(reading, peers, now)
        if now - self._last_xid_at.get("xid_warning", now) >= QUIET_S:
            changes += self._over("xid_warning")
        self._last = reading
        return changes

    def _repair_seen(self, new: DeviceReading) -> bool:
        """Return whether the GPU was reset, or a lost GPU has returned, since the last reading.

        The first reading also stores the GPU's count of ECC errors. Only errors beyond this count are reported as a fault.
        """
        if self._last is None:
            self._ecc = new.ecc or 0
            return "lost" in self.standing
        recovered = new.recovery == 0 and ("recovery" in self.standing or bool(self._last.recovery))
        return (
            "lost" in self.standing or recovered or (new.ecc is not None and new.ecc < (self._last.ecc or 0))
        )

    def _repaired(self, reading: DeviceReading) -> Iterator[FaultChange]:
        self._ecc = reading.ecc or 0
        for fault_class in ("lost", *sorted(REPAIRED_BY_RESET)):
            yield from self._over(fault_class)

    def _levels(self, new: DeviceReading, now: float) -> Iterator[tuple[str, str | None]]:
        """Yield each fault class that the reading covers, with the code of the fault, or None if there is no such fault."""
        if new.ecc is not None and new.ecc > self._ecc:
            yield "ecc", "volatile"
        for remap, pending in (
            ("row_remap_failure", new.remap_failed),
            ("row_remap_pending", new.remap_pending),
        ):
            if pending is not None:
                yield remap, "" if pending else None
        if new.recovery is not None:
            yield "recovery", RESETS.get(new.recovery)
        if new.links:
            yield "nvlink_down", self._links_down(new.links) or None
        if any(count is not None for count in new.link_errors):
            yield "nvlink_errors", "" if self._link_errors_grow(new, now) else None
        yield from _pcie_levels(new)
        if (margin := new.until_slow) is not None:
            hot = margin <= (COOL_BY_C if "temperature" in self.standing else 0)
            yield "temperature", "" if hot else None

    def _links_down(self, links: Sequence[bool | None]) -> str:
        """Return the comma-separated numbers of the NVLinks that are down and were up before; empty if none."""
        self._up |= {number for number, up in enumerate(links) if up}
        return ",".join(str(n) for n in sorted(self._up) if n < len(links) and links[n] is False)

    def _link_errors_grow(self, new: DeviceReading, now: float) -> bool:
        """Return whether the error count of any NVLink has increased in the last 300 s."""
        before = self._last.link_errors if self._last else ()
        counts = zip(new.link_errors, before, strict=False)
        if any(b is not None and n is not None and n > b for n, b in counts):
            self._grew_at = now
        return now - self._grew_at < QUIET_S

    def _throttling(self, new: DeviceReading, peers: tuple[int, ...], now: float) -> Iterator[FaultChange]:
        if new.reasons is None:
            return
        weight = None if new.idle else clock_weight(new.clock, peers, new.clock_max)
        self._throttle = evolve(self._policy, self._throttle, bool(new.throttled), weight, now)
        if self._throttle.reported is None:
            yield from self._over("throttle")
        elif new.throttled:
            yield from self._fault("throttle", "throttle", new.throttled, self._throttle.reported)

    def _fault(
        self, fault_class: str, action: Action, code: str, weight: float | None = None
    ) -> Iterator[FaultChange]:
        if action == "nvlink" and self.linked:
            weight = 0.0
        change = FaultChange(fault_class=fault_class, code=code, fatal=action == "fatal", weight=weight)
        if self.standing.get(fault_class) != change:
            self.standing[fault_class] = change
            self._restored.discard(fault_class)
            yield change

    def _over(self, fault_class: str) -> Iterator[FaultChange]:
        active = self.standing.pop(fault_class, None)
        self._restored.discard(fault_class)
        if active is not None:
            yield FaultChange(fault_class=fault_class, code=active.code, over=True)


def _pcie_levels(new: DeviceReading) -> Iterator[tuple[str, str | None]]:
    if new.pcie_width and new.pcie_width_max:
        narrow = new.pcie_width < new.pcie_width_max
        if not (narrow and new.idle):  # an idle GPU may narrow its link to save power
            yield "pcie_width", f"x{new.pcie_width} of x{new.pcie_width_max}" if narrow else None
