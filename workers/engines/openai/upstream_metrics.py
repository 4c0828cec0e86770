"""Reads the load of an upstream from its `/metrics`, every second.

An upstream may have other clients. The upstream knows all its waiting and running requests and its KV cache usage; the worker
only knows the requests that it has sent. A report is used for 5 s, then ignored.

             vLLM                          SGLang                    llama-server
running      vllm:num_requests_running     sglang:num_running_reqs   llamacpp:requests_processing
waiting      vllm:num_requests_waiting     sglang:num_queue_reqs     llamacpp:requests_deferred
KV in use    vllm:kv_cache_usage_perc (1)  sglang:token_usage        llamacpp:kv_cache_usage_ratio
KV blocks    vllm:cache_config_info

(1) a share from 0 to 1; `vllm:gpu_cache_usage_perc` in earlier versions
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from events.wire import Load

EVERY_S = 1.0
STALE_S = 5.0
MOST = 1e9  # upper limit of any value: larger ones cannot be counts, and would not fit into the messages

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
KV_USAGE = (
    "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio",
)  # fmt: skip
KV_BLOCKS = "vllm:cache_config_info"
RANKS = ("engine", "dp_rank")  # the labels that distinguish DP ranks
_INTO = {name: place for place, names in enumerate((RUNNING, WAITING, KV_USAGE)) for name in names}
_SAMPLE = re.compile(rf"^({'|'.join([*_INTO, KV_BLOCKS])})(?:\{{(.*)\}})?[ \t]+(\S+)", re.MULTILINE)
# by name: a pattern for any label would be slow, as it is tried at each letter of a long label
_LABELS = (*RANKS, "block_size", "num_gpu_blocks")
_LABEL = re.compile(rf'\b({"|".join(_LABELS)})="([^"\\]*)"')
_NUMBER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class UpstreamRankLoad:
    """The load of one DP rank."""

    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None  # share from 0 to 1


@dataclass(frozen=True, slots=True)
class UpstreamReport:
    """One report of an upstream, with one entry per DP rank, in rank order."""

    ranks: tuple[UpstreamRankLoad, ...]
    block_tokens: int | None = None
    kv_blocks: int | None = None  # of one rank


def read_metrics(text: str) -> UpstreamReport | None:
    """Parse the load from a metrics text; None if the server is of an unknown kind."""
    found: tuple[dict[str, float], ...] = ({}, {}, {})
    about: dict[str, str] = {}
    for name, labels, value in _samples(text):
        if name == KV_BLOCKS:
            about = about or labels
            continue
        into, rank = found[_INTO[name]], next((labels[label] for label in RANKS if label in labels), "0")
        # SGLang repeats a value for each GPU of a rank, and each process of a server for the shared engine.
        into[rank] = max(into.get(rank, 0.0), value)
    running, waiting, usage = found
    if not running:
        return None
    loads = tuple(
        UpstreamRankLoad(round(running[rank]), round(waiting.get(rank, 0.0)), usage.get(rank))
        for rank in sorted(running, key=lambda rank: (len(rank), rank))
    )
    return UpstreamReport(loads, _number(about.get("block_size")), _number(about.get("num_gpu_blocks")))


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the relevant samples: name, labels, value. Values that are not numbers are skipped."""
    for name, labels, number in _SAMPLE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        if 0 <= value <= MOST:
            yield name, dict(_LABEL.findall(labels)), value


def _number(text: str | None) -> int | None:
    return int(text) or None if text is not None and _NUMBER.fullmatch(text) else None


@dataclass(slots=True)
class UpstreamLoad:
    """The last report, its time (seconds of any monotonic clock), and this worker's requests at that time."""

    stale_s: float = STALE_S  # older reports are ignored
    report: UpstreamReport | None = None
    at: float = float("-inf")
    own: int = 0

    def take(self, report: UpstreamReport | None, own: int, now: float) -> None:
        """Store one report; None: the read failed."""
        if report is not None:
            self.report, self.own, self.at = report, own, now

    def fresh(self, now: float) -> UpstreamReport | None:
        """Return the last report, unless it is too old."""
        return self.report if now - self.at <= self.stale_s else None

    def combined(self, own: Load, batch_max: int, now: float) -> Load:
        """Return the load of the whole upstream: other clients' requests at the last report, and this worker's requests now."""
        report = self.fresh(now)
        if report is None:
            return own
        running = sum(rank.running for rank in report.ranks)
        waiting = sum(rank.waiting for rank in report.ranks)
        total = own.running + own.waiting + max(0, running + waiting - self.own)
        at_once = running if waiting else max(running, batch_max)
        usages = [rank.kv_usage for rank in report.ranks if rank.kv_usage is not None]
        used = round(min(1.0, sum(usages) / len(usages)) * own.kv_total) if usages else own.kv_used
        return msgspec.structs.replace(
            own, running=min(total, at_once), waiting=max(0, total - at_once), kv_used=used
        )


def rank_loads(report: UpstreamReport, kv_blocks: int) -> list[Load]:
    """Return each rank's load, with `kv_blocks` blocks each. Tokens are not reported; used blocks are computed from the usage."""
    return [
        Load(rank.running, rank.waiting, round(min(1.0, rank.kv_usage or 0.0) * kv_blocks), kv_blocks)
        for rank in report.ranks
    ]
