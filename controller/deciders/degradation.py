"""Degradation: does a model's capacity still carry its SLO, and what is given up if not?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from events.decisions import Decision, DegradationChanged, HealthChanged, HealthStatus, Knobs
from events.fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What one model has promised. Without `slo_throughput_rps` its ladder is off."""

    slo_throughput_rps: float | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    max_batch_size: int | None = None
    mean_prompt_tokens: int = 1536  # with the next, the seed's average sequence of 2,048 tokens
    mean_output_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradationPolicy:
    """The ladder of every model, and each model's SLO."""

    slos: Mapping[str, Slo] = field(default_factory=dict)  # by model name
    entries: tuple[float, float, float, float] = (1.0, 0.75, 0.5, 0.25)  # below entries[n] is past level n
    margin: float = 0.05  # a level is left only this far above its entry
    dwell: timedelta = timedelta(seconds=10)  # the least time at a level before a better one
    priority_tiers: tuple[str, ...] = ("premium", "standard", "best_effort")  # best first


@dataclass(frozen=True, slots=True)
class Degradation:
    """One model's degradation."""

    model: str
    level: int = 0
    knobs: Knobs = Knobs()
    ratio: float | None = None  # capacity / SLO throughput, when it was last decided
    capacity_rps: float | None = None
    since: datetime | None = None  # when the level was taken, by the deciding controller's clock
    served: bool = False  # a worker of this model has been routable
    incident: str = ""
    cause: str = ""
