"""What is wrong with one GPU: readings and Xids in, changes out.

A change is said once: a fault when it begins or its code or weight changes, a clearing when it ends. What cannot be read
changes nothing, and a GPU that is lost keeps its other faults: nobody can see whether they are gone.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from workers.devices import throttle
from workers.devices.taxonomy import LEVELS, XID_CLASSES, Action, xid_meaning
from workers.devices.throttle import Throttle, ThrottlePolicy

QUIET_S = 300.0  # a warning that came as an event is over when it did not come again for so long
COOL_BY_C = 5  # a hot GPU is cool again so far below the limit

THERMAL = 0x20 | 0x40  # clock-event reasons: software and hardware thermal slowdown
POWER_BRAKE = 0x80 | 0x08  # the power supply's brake; a hardware slowdown without a named cause
IDLE = 0x01
MENDED = frozenset(("xid", "xid_nvlink", "ecc"))  # by a reset
RESETS = {1: "gpu_reset", 2: "node_reboot", 4: "drain_and_reset", 6: "bus_reset", 7: "system_reboot"}
"""The driver's recovery actions that end with a reset; to drain peer-to-peer traffic (3) is NVLink's, and said there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """One look at one GPU. What it does not support is None."""

    lost: bool = False
    ecc: int | None = None  # uncorrectable, volatile: since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery: int | None = None  # the action that the driver recommends; 0: none
    reasons: int | None = None  # clock-event reasons, bits
    clock: int | None = None  # of the streaming multiprocessors, MHz
    clock_max: int | None = None
    temperature: int | None = None  # °C
    slowdown: int | None = None  # °C at which it slows itself down
    margin: int | None = None  # °C until then, of those that do not say at which (Ada and later)
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    links: tuple[bool | None, ...] = ()  # NVLinks, up or down
    link_errors: tuple[int | None, ...] = ()  # of each link: replays and recoveries so far

    @property
    def throttled(self) -> str:
        """Why the clocks are reduced, if heat or power supply are the reason."""
        reasons = self.reasons or 0
        return "thermal" if reasons & THERMAL else "power_brake" if reasons & POWER_BRAKE else ""

    @property
    def until_slow(self) -> int | None:
        """How many °C it is from slowing itself down."""
        if self.temperature is None or not self.slowdown:
            return self.margin
        return self.slowdown - self.temperature

    @property
    def idle(self) -> bool:
        """Whether its clock says nothing, because nothing runs."""
        return bool((self.reasons or 0) & IDLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultChange:
    """A fault began (or has another code or weight), or is over."""

    fault_class: str
    code: str = ""
    fatal: bool = False
    weight: float | None = (
        None  # what it leaves of the worker's share; None: all of it, or nothing if it is fatal
    )
    over: bool = False
    found: bool = field(default=False, compare=False)  # it was there already when the watch began


Say = Callable[[str, FaultChange], None]
"""Called with a device's UUID and what has changed about it, perhaps from another thread than the loop's."""


class DeviceFaults:
    """What stands against one GPU. `linked`: its worker has more GPUs than this one, and needs the links."""

    def __init__(self, linked: bool = False, policy: ThrottlePolicy | None = None) -> None:
        self.linked = linked
        self.standing: dict[str, FaultChange] = {}
        self._policy = policy or ThrottlePolicy()
        self._throttle = Throttle()
        self._heard_at: dict[str, float] = {}  # class of Xids → when the last came
        self._last: DeviceReading | None = None  # that was no loss
        self._ecc = 0  # errors before the watch began, or before the last repair
        self._up: set[int] = set()  # links that have been up
        self._grew_at = float("-inf")  # when link errors were counted last
        self._before: set[str] = set()  # classes that stand by the word of the watch before this one
        self._fresh = True  # nothing was read yet

    def restore(self, changes: Iterable[FaultChange], now: float) -> None:
        """Begin with what stood when the watch before this one ended. The first reading shows what of it is over."""
        for change in changes:
            self.standing[change.fault_class] = change
            self._before.add(change.fault_class)
            match change.fault_class:
                case "xid_warning":
                    self._heard_at[change.fault_class] = now
                case "nvlink_errors":
                    self._grew_at = now
                case "nvlink_down":
                    self._up |= {int(number) for number in change.code.split(",") if number.isdecimal()}
                case "throttle":
                    self._throttle = Throttle(throttled=True, since=now, said=change.weight)

    def xid(self, code: int, now: float) -> list[FaultChange]:
        """Absorb an Xid."""
        action = xid_meaning(code).action
        fault_class = XID_CLASSES[action]
        self._heard_at[fault_class] = now
        if fault_class in self._before:  # the same again is news
            self._before.discard(fault_class)
            del self.standing[fault_class]
        return list(self._fault(fault_class, action, str(code)))

    def repaired(self) -> list[FaultChange]:
        """Absorb that the device was replaced, or reset: nothing stands against it any more."""
        return [change for fault_class in list(self.standing) for change in self._over(fault_class)]

    def mended(self, code: int) -> list[FaultChange]:
        """Absorb that what an Xid said is repaired. Where another Xid of its class has come since, that stands."""
        fault_class = XID_CLASSES[xid_meaning(code).action]
        stands = self.standing.get(fault_class)
        return list(self._over(fault_class)) if stands is not None and stands.code == str(code) else []

    def read(self, reading: DeviceReading, peers: tuple[int, ...], now: float) -> list[FaultChange]:
        """Absorb a reading; `peers` are the clocks of GPUs of its kind that are busy and not throttled."""
        first, fresh, self._fresh = self._last is None, self._fresh, False
        changes = list(self._inherited(reading)) if fresh and not reading.lost else []
        changes += self._read(reading, peers, now)
        if fresh:  # what still stands is told of this life, too
            changes += [fault for name, fault in self.standing.items() if name in self._before]
        return [replace(change, found=True) for change in changes] if first else changes

    def _inherited(self, new: DeviceReading) -> Iterator[FaultChange]:
        """Say which of the restored faults that a reset mends are over: a driver that recommends nothing has seen it.
        Where the driver has no such word they are forgotten, and canaries have to find out."""
        for fault_class in sorted(MENDED & self._before):
            if new.recovery is None:
                self._before.discard(fault_class)
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
        if now - self._heard_at.get("xid_warning", now) >= QUIET_S:
            changes += self._over("xid_warning")
        self._last = reading
        return changes

    def _repair_seen(self, new: DeviceReading) -> bool:
        """Return whether the GPU was reset since the last reading. The first reading only shows where we begin."""
        if self._last is None:
            self._ecc = new.ecc or 0
            return "lost" in self.standing
        recovered = new.recovery == 0 and ("recovery" in self.standing or bool(self._last.recovery))
        return (
            "lost" in self.standing or recovered or (new.ecc is not None and new.ecc < (self._last.ecc or 0))
        )

    def _repaired(self, reading: DeviceReading) -> Iterator[FaultChange]:
        self._ecc = reading.ecc or 0
        for fault_class in ("lost", *sorted(MENDED)):
            yield from self._over(fault_class)

    def _levels(self, new: DeviceReading, now: float) -> Iterator[tuple[str, str | None]]:
        """Yield each class that can be read, with its code, or None where all is well."""
        if new.ecc is not None and new.ecc > self._ecc:
            yield "ecc", "volatile"
        if new.remap_failed is not None:
            yield "row_remap_failure", "" if new.remap_failed else None
        if new.remap_pending is not None:
            yield "row_remap_pending", "" if new.remap_pending else None
        if new.recovery is not None:
            yield "recovery", RESETS.get(new.recovery)
        if new.links:
            self._up |= {number for number, up in enumerate(new.links) if up}
            down = [str(n) for n in sorted(self._up) if n < len(new.links) and new.links[n] is False]
            yield "nvlink_down", ",".join(down) or None
        if any(count is not None for count in new.link_errors):
            before = self._last.link_errors if self._last else ()
            grew = any(
                b is not None and n is not None and n > b
                for n, b in zip(new.link_errors, before, strict=False)
            )
            self._grew_at = now if grew else self._grew_at
            yield "nvlink_errors", "" if now - self._grew_at < QUIET_S else None
        if new.pcie_width and new.pcie_width_max:
            narrow = new.pcie_width < new.pcie_width_max
            if not (narrow and new.idle):  # one that rests may narrow its link to save power
                yield "pcie_width", f"x{new.pcie_width} of x{new.pcie_width_max}" if narrow else None
        if (margin := new.until_slow) is not None:
            hot = margin <= (COOL_BY_C if "temperature" in self.standing else 0)
            yield "temperature", "" if hot else None

    def _throttling(self, new: DeviceReading, peers: tuple[int, ...], now: float) -> Iterator[FaultChange]:
        if new.reasons is None:
            return
        weight = None if new.idle else throttle.clock_weight(new.clock, peers, new.clock_max)
        self._throttle = throttle.evolve(self._policy, self._throttle, bool(new.throttled), weight, now)
        if self._throttle.said is None:
            yield from self._over("throttle")
        elif new.throttled:
            yield from self._fault("throttle", "throttle", new.throttled, self._throttle.said)

    def _fault(
        self, fault_class: str, action: Action, code: str, weight: float | None = None
    ) -> Iterator[FaultChange]:
        if action == "nvlink" and self.linked:
            weight = 0.0
        change = FaultChange(fault_class=fault_class, code=code, fatal=action == "fatal", weight=weight)
        if self.standing.get(fault_class) != change:
            self.standing[fault_class] = change
            self._before.discard(fault_class)
            yield change

    def _over(self, fault_class: str) -> Iterator[FaultChange]:
        stood = self.standing.pop(fault_class, None)
        self._before.discard(fault_class)
        if stood is not None:
            yield FaultChange(fault_class=fault_class, code=stood.code, over=True)
