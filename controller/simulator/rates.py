"""Accelerator failure rates from field studies, and the GPU-hours that a fleet loses through them.

Two quantities are easily confused:

- *Failure events per day* depends only on the number of devices, and not on the size `tp` of the tensor-parallel groups.
- *GPU-hours lost per day* = events per day × `tp` × hours to repair, because a failed device takes its whole group out of
  service.

Each preset is a failure rate per GPU-day or node-day, with its source. The mean time between failures (`mtbf_hours`)
follows from the rate and the size of the fleet. For example, an annual failure rate of 3 % at 1,000 GPUs is one failure in
12 days. One failure per day at 1,000 GPUs is an annual rate of 36.5 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass

DAYS_PER_YEAR = 365.0
HOURS_PER_YEAR = 8760.0
GPUS_PER_NODE = 8

# The kinds of fault that the simulator can inject.
FAULTS = ("crash", "hang", "device", "error", "corrupt", "slow", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The failure rate and the kinds of failures that one field study measured.

    `per_gpu_day` counts failures of any cause per GPU and day. `mix` distributes the failures over the simulator's kinds of
    faults, with shares that add up to 1. `gpu_share` is the share of failures that the GPU itself caused, or None if the
    source does not report this share. `mttr_hours` is the mean time until the capacity is restored.
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
        """The annual failure rate of one GPU, for all causes. For example, 0.03 is 3 % a year."""
        return self.per_gpu_day * DAYS_PER_YEAR


def mtbf_hours(gpus: int, afr: float) -> float:
    """Return the mean time between failures of a fleet in hours: 8,760 / (GPUs × annual failure rate).

    Raise ValueError for a fleet without GPUs or a rate of 0.
    """
    if gpus < 1 or afr <= 0:
        raise ValueError(
            f"a fleet of {gpus} GPUs with an annual failure rate of {afr} has no time between failures"
        )
    return HOURS_PER_YEAR / (gpus * afr)


# The fault classes of each study: the number of failures, and the fault kind that the fleet observes. Maintenance and host
# parts stop the process; a NIC or a switch disconnects it; a watchdog is a hang; a hot GPU throttles.
LLAMA3_CLASSES: Mapping[str, tuple[int, str]] = {
    "faulty GPU": (148, "device"), "GPU HBM3": (72, "device"), "software": (54, "error"),
    "network switch or cable": (35, "network"), "host maintenance": (32, "crash"), "GPU SRAM": (19, "device"),
    "GPU system processor": (17, "device"), "NIC": (7, "network"), "NCCL watchdog": (7, "hang"),
    "silent data corruption": (6, "corrupt"), "GPU thermal interface": (6, "slow"), "SSD": (3, "crash"),
    "power supply": (3, "crash"), "server chassis": (2, "crash"), "IO board": (2, "crash"),
    "dependency": (2, "error"), "CPU": (2, "crash"), "system memory": (2, "crash"),
}  # fmt: skip
STEPFUN_CLASSES: Mapping[str, tuple[int, str]] = {
    "unknown": (113, "crash"), "stress test": (55, "error"), "cable": (32, "network"), "GPU": (59, "device"),
    "power supply": (21, "crash"), "NIC": (16, "network"), "fan": (10, "slow"), "software": (5, "error"),
    "system crash": (1, "crash"), "motherboard battery": (1, "crash"),
}  # fmt: skip


def _mix(classes: Mapping[str, tuple[int, str]]) -> Mapping[str, float]:
    total = sum(count for count, _ in classes.values())
    shares = dict.fromkeys(FAULTS, 0.0)
    for count, looks_like in classes.values():
        shares[looks_like] += count / total
    return shares


PRESETS: Mapping[str, Rates] = {
    rates.name: rates
    for rates in (
        Rates(
            name="llama3",
            source="The Llama 3 Herd of Models, §3.3.4 and table 5: 419 unexpected interruptions, 54 days, 16,384 H100",
            per_gpu_day=419 / (54 * 16_384),
            mix=_mix(LLAMA3_CLASSES),
            gpu_share=0.587,
        ),
        Rates(
            name="meta-rsc1",
            source="Kokolis et al., Revisiting Reliability in Large-Scale ML Research Clusters (HPCA 2025): RSC-1, "
            "6.50 failures per 1,000 node-days; the class mix is llama3's, because none was published",
            per_gpu_day=6.50 / 1000 / GPUS_PER_NODE,
            mix=_mix(LLAMA3_CLASSES),
        ),
        Rates(
            name="meta-rsc2",
            source="the same paper: RSC-2, 2.34 failures per 1,000 node-days; the class mix is llama3's",
            per_gpu_day=2.34 / 1000 / GPUS_PER_NODE,
            mix=_mix(LLAMA3_CLASSES),
        ),
        Rates(
            name="stepfun-2024",
            source="InfiniteHBD-Trace (StepFun): 584 faults, 400 eight-GPU nodes, 348 days = 4.20 per 1,000 "
            "node-days (2.14 hardware, 1.14 GPU); class mix of its published half (313 fault starts)",
            per_gpu_day=584 / (400 * 348) / GPUS_PER_NODE,
            mix=_mix(STEPFUN_CLASSES),
            gpu_share=1.14 / 4.20,
            mttr_hours=5.54 * 24,
            mttr_source="the trace's mean repair time of 5.54 days (its median is 20.4 hours)",
        ),
        Rates(
            name="seed-3pct",
            source="the design seed's 3 % of GPUs a year: about right for GPU hardware alone, not for all causes",
            per_gpu_day=0.03 / DAYS_PER_YEAR,
            mix={"device": 1.0},
            gpu_share=1.0,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The failures that a preset predicts for a fleet.

    `failures_per_day` and `gpu_hours_lost_per_day` are different quantities, and must not be added.
    """

    rates: Rates
    gpus: int
    tp: int

    @property
    def failures_per_day(self) -> float:
        """Failure events per day of the whole fleet, whatever the size of the tensor-parallel groups."""
        return self.rates.per_gpu_day * self.gpus

    @property
    def gpu_hours_lost_per_day(self) -> float:
        """GPU-hours lost per day: failure events per day × `tp` × hours to repair.

        Each event takes a tensor-parallel group of `tp` GPUs out of service.
        """
        return self.failures_per_day * self.tp * self.rates.mttr_hours

    @property
    def mtbf_hours(self) -> float:
        """The mean time in hours between failure events of the whole fleet."""
        return mtbf_hours(self.gpus, self.rates.afr)
