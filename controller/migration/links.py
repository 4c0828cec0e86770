"""Determines the link over which a KV cache is sent between two workers, and the link's speed.

    one host, one NVLink domain       nvlink_direct
    two hosts, one NVLink domain      nvswitch          a domain spans hosts through switches only
    one host, no common domain        `LinkTable.pcie`
    two hosts, one rail               infiniband        each device has its own adapter
    two hosts, two rails              infiniband        all shards share one adapter's rate
    anything not registered           tcp               all shards share the host's link

A rail is the network to which the same adapter of each host is connected. Every rate is for one direction, whereas data
sheets often give the sum of both directions (H100: "900 GB/s" is 450 GB/s each way). InfiniBand gives 50 GB/s per device only
if each device has its own adapter. Otherwise the shards of a group share one adapter (`Lane.sharers`).
"""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from events.observations import Topology

LinkName = Literal["nvlink_direct", "nvswitch", "pcie_gen4", "pcie_gen5", "infiniband", "tcp"]
STRICT = {"extra": "forbid"}  # as `__pydantic_config__`: settings reject unknown names


def above_zero(**values: float) -> None:
    """Raise ValueError for the first of `values` that is not a finite number above 0."""
    for name, value in values.items():
        if not (value > 0 and isfinite(value)):
            raise ValueError(f"{name} is {value}: it must be a finite number above 0")


def at_least_zero(**values: float) -> None:
    """Raise ValueError for the first of `values` that is not a finite number of at least 0."""
    for name, value in values.items():
        if not (value >= 0 and isfinite(value)):
            raise ValueError(f"{name} is {value}: it must be a finite number, at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The speed of one kind of link, in one direction."""

    bytes_per_s: float  # wire rate
    latency_s: float = 0.0  # until the first byte arrives
    efficiency: float = 1.0  # share of `bytes_per_s` that copies reach
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        above_zero(bytes_per_s=self.bytes_per_s)
        at_least_zero(latency_s=self.latency_s)
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency}: it must be above 0 and at most 1")
        if self.rate < 1:
            raise ValueError(f"bytes_per_s x efficiency is {self.rate}: it must be at least 1")

    @property
    def rate(self) -> float:
        """The effective rate in bytes per second, in one direction."""
        return self.bytes_per_s * self.efficiency

    def wire_s(self, size: float) -> float:
        """Return the seconds for `size` bytes at the effective rate, without the latency."""
        return size / self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """The speed of each kind of link. docs/guides/planned-moves.md gives the source of each number."""

    nvlink_direct: LinkSpec = LinkSpec(bytes_per_s=450e9, latency_s=3.4e-6, efficiency=0.84)
    nvswitch: LinkSpec = LinkSpec(bytes_per_s=900e9, latency_s=3.4e-6, efficiency=0.84)
    pcie_gen4: LinkSpec = LinkSpec(bytes_per_s=31.5e9, latency_s=5.7e-6, efficiency=0.889)
    pcie_gen5: LinkSpec = LinkSpec(bytes_per_s=63e9, latency_s=5.7e-6, efficiency=0.873)
    infiniband: LinkSpec = LinkSpec(bytes_per_s=50e9, latency_s=14e-6, efficiency=0.96)
    tcp: LinkSpec = LinkSpec(bytes_per_s=12.5e9, latency_s=100e-6, efficiency=0.8)
    pcie: Literal["pcie_gen4", "pcie_gen5"] = "pcie_gen4"  # generation of this fleet's hosts
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        if self.pcie not in ("pcie_gen4", "pcie_gen5"):
            raise ValueError(f"pcie is {self.pcie!r}: it must be pcie_gen4 or pcie_gen5")

    def spec(self, name: str) -> LinkSpec:
        """Return the link of this name. Raise ValueError if it is unknown."""
        if name not in get_args(LinkName):
            raise ValueError(f"{name!r} is not a link: it must be one of {', '.join(get_args(LinkName))}")
        found: LinkSpec = getattr(self, name)
        return found


@dataclass(frozen=True, slots=True)
class Lane:
    """The path of one shard's KV blocks to the target's shard of the same rank.

    `sharers` is the number of shards that share the link's rate.
    """

    link: LinkName
    sharers: int = 1


def lanes(links: LinkTable, source: Topology, target: Topology, tp: int) -> tuple[Lane, ...]:
    """Return one lane for each pair of shards of two workers with `tp` ranks, in rank order."""
    link, own = _link(links, source, target)
    return (Lane(link, 1 if own else tp),) * tp


def _link(links: LinkTable, source: Topology, target: Topology) -> tuple[LinkName, bool]:
    """Return the link between two workers, and whether each shard has a link of its own.

    A worker registers one host, one domain and one rail, so all its shards have the same kind of link.
    """
    if not (source.gpus and target.gpus and source.host and target.host):
        return "tcp", False
    here = source.host == target.host
    if source.nvlink_domain and source.nvlink_domain == target.nvlink_domain:
        return ("nvlink_direct" if here else "nvswitch"), True
    if here:
        return links.pcie, True
    if source.rail and target.rail:
        return "infiniband", source.rail == target.rail
    return "tcp", False
