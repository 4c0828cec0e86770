"""How often do accelerators fail in the field, and what does that cost a fleet?

Two figures that are easily taken for one another are kept apart:

- *failure events per day* depends on the number of devices alone. Grouping devices into tensor-parallel groups does
  not change it;
- *GPU-hours lost per day* = events × tp × time to repair: a failing device takes its whole group along.

There is no "once a day": a preset is a rate per GPU-day or per node-day with its source, and `mtbf_hours` follows
from the size of the fleet. A 3 % annual failure rate at 1,000 GPUs is one failure in 12 days; once a day needs 36.5 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

V = TypeVar("V", int, float)

DAYS_PER_YEAR = 365.0
HOURS_PER_YEAR = 8760.0
GPUS_PER_NODE = 8

# The kinds of fault that the simulator can inject.
FAULTS = ("crash", "hang", "device", "error", "corrupt", "slow", "network")


def _frozen(mix: Mapping[str, V]) -> Mapping[str, V]:
    return MappingProxyType(dict(mix))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One field study: how often, and of which kind.

    `per_gpu_day` counts failures of any cause for one GPU in one day. `mix` says how the failures divide over the
    kinds that the simulator knows; its shares add up to 1. `gpu_share` is the part that is the GPU's own fault, None
    where the source does not say. `mttr_hours` is the mean time until the capacity is back.
    """

    name: str
    source: str
    per_gpu_day: float
    mix: Mapping[str, float]
    gpu_share: float | None = None
    mttr_hours: float = 24.0
    mttr_source: str = "assumed: one working day until a device is swapped"

    @property
    def afr(self) -> float:
        """The annual failure rate of one GPU (0.03 is 3 % a year), all causes."""
        return self.per_gpu_day * DAYS_PER_YEAR

    def failures_per_day(self, gpus: int) -> float:
        """Return failure events per day of a fleet; however the GPUs are grouped, it is the same."""
        return self.per_gpu_day * gpus

    def gpu_hours_lost_per_day(self, gpus: int, tp: int) -> float:
        """Return the GPU-hours that failures cost per day: each event stops its whole group of `tp` GPUs."""
        return self.failures_per_day(gpus) * tp * self.mttr_hours


def mtbf_hours(gpus: int, afr: float) -> float:
    """Return the mean time between failures of a fleet in hours: 8,760 / (GPUs × annual failure rate). Raise ValueError where
    nothing ever fails."""
    if gpus < 1 or afr <= 0:
        raise ValueError(
            f"a fleet of {gpus} GPUs with an annual failure rate of {afr} has no time between failures"
        )
    return HOURS_PER_YEAR / (gpus * afr)


def per_gpu_day(*, per_1000_node_days: float, gpus_per_node: int = GPUS_PER_NODE) -> float:
    """Return a rate per GPU-day from one per 1,000 node-days."""
    return per_1000_node_days / 1000 / gpus_per_node


LLAMA3_CLASSES = _frozen({
    "faulty GPU": 148, "GPU HBM3": 72, "software": 54, "network switch or cable": 35, "host maintenance": 32,
    "GPU SRAM": 19, "GPU system processor": 17, "NIC": 7, "NCCL watchdog": 7, "silent data corruption": 6,
    "GPU thermal interface": 6, "SSD": 3, "power supply": 3, "server chassis": 2, "IO board": 2, "dependency": 2,
    "CPU": 2, "system memory": 2,
})  # fmt: skip
# What each of these looks like to a fleet. Maintenance and host parts take the process down; a NIC or a switch
# cuts it off; a watchdog is a hang; a hot GPU throttles.
_LOOKS_LIKE = {
    "faulty GPU": "device", "GPU HBM3": "device", "software": "error", "network switch or cable": "network",
    "host maintenance": "crash", "GPU SRAM": "device", "GPU system processor": "device", "NIC": "network",
    "NCCL watchdog": "hang", "silent data corruption": "corrupt", "GPU thermal interface": "slow", "SSD": "crash",
    "power supply": "crash", "server chassis": "crash", "IO board": "crash", "dependency": "error", "CPU": "crash",
    "system memory": "crash",
}  # fmt: skip


def _mix(classes: Mapping[str, int], looks_like: Mapping[str, str]) -> Mapping[str, float]:
    total = sum(classes.values())
    shares = dict.fromkeys(FAULTS, 0.0)
    for name, count in classes.items():
        shares[looks_like[name]] += count / total
    return _frozen(shares)


STEPFUN_CLASSES = _frozen({
    "unknown": 113, "stress test": 55, "cable": 32, "GPU": 59, "power supply": 21, "NIC": 16, "fan": 10,
    "software": 5, "system crash": 1, "motherboard battery": 1,
})  # fmt: skip
_STEPFUN_LOOKS_LIKE = {
    "unknown": "crash", "stress test": "error", "cable": "network", "GPU": "device", "power supply": "crash",
    "NIC": "network", "fan": "slow", "software": "error", "system crash": "crash", "motherboard battery": "crash",
}  # fmt: skip

PRESETS: Mapping[str, Rates] = MappingProxyType({
    rates.name: rates
    for rates in (
        Rates(
            name="llama3",
            source="The Llama 3 Herd of Models, §3.3.4 and table 5: 419 unexpected interruptions, 54 days, 16,384 H100",
            per_gpu_day=419 / (54 * 16_384),
            mix=_mix(LLAMA3_CLASSES, _LOOKS_LIKE),
            gpu_share=0.587,
        ),
        Rates(
            name="meta-rsc1",
            source="Kokolis et al., Revisiting Reliability in Large-Scale ML Research Clusters (HPCA 2025): RSC-1, "
            "6.50 failures per 1,000 node-days; the class mix is llama3's, because none was published",
            per_gpu_day=per_gpu_day(per_1000_node_days=6.50),
            mix=_mix(LLAMA3_CLASSES, _LOOKS_LIKE),
        ),
        Rates(
            name="meta-rsc2",
            source="the same paper: RSC-2, 2.34 failures per 1,000 node-days; the class mix is llama3's",
            per_gpu_day=per_gpu_day(per_1000_node_days=2.34),
            mix=_mix(LLAMA3_CLASSES, _LOOKS_LIKE),
        ),
        Rates(
            name="stepfun-2024",
            source="InfiniteHBD-Trace (StepFun): 584 faults, 400 eight-GPU nodes, 348 days = 4.20 per 1,000 "
            "node-days (2.14 hardware, 1.14 GPU); class mix of its published half (313 fault starts)",
            per_gpu_day=584 / (400 * 348) / GPUS_PER_NODE,
            mix=_mix(STEPFUN_CLASSES, _STEPFUN_LOOKS_LIKE),
            gpu_share=1.14 / 4.20,
            mttr_hours=5.54 * 24,
            mttr_source="the trace's mean repair time of 5.54 days (its median is 20.4 hours)",
        ),
        Rates(
            name="seed-3pct",
            source="the design seed's 3 % of GPUs a year: about right for GPU hardware alone, not for all causes",
            per_gpu_day=0.03 / DAYS_PER_YEAR,
            mix=_frozen({"device": 1.0}),
            gpu_share=1.0,
        ),
    )
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a preset means for a fleet. The two losses are never added up: they answer different questions."""

    rates: Rates
    gpus: int
    tp: int

    @property
    def failures_per_day(self) -> float:
        """Failure events per day, independent of tp."""
        return self.rates.failures_per_day(self.gpus)

    @property
    def gpu_hours_lost_per_day(self) -> float:
        """Events × tp × time to repair."""
        return self.rates.gpu_hours_lost_per_day(self.gpus, self.tp)

    @property
    def mtbf_hours(self) -> float:
        """Hours between failure events of the whole fleet."""
        return mtbf_hours(self.gpus, self.rates.afr)
