"""Parses the load of an upstream from the text of its `/metrics` page.

The worker knows only the requests that it has sent itself, but an upstream may have other clients. The page reports the numbers
of all running and waiting requests, and the usage of the KV cache. It is read every second. A report older than 5 s is ignored.
These metrics are read:

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
MOST = 1e9  # a larger value is ignored, because it cannot be a count and might not fit into a message

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
KV_USAGE = (
    "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio",
)  # fmt: skip
KV_BLOCKS = "vllm:cache_config_info"
RANKS = ("engine", "dp_rank")  # the labels that distinguish DP ranks
_INTO = {name: place for place, names in enumerate((RUNNING, WAITING, KV_USAGE)) for name in names}
_SAMPLE = re.compile(rf"^({'|'.join([*_INTO, KV_BLOCKS])})(?:\{{(.*)\}})?[ \t]+(\S+)", re.MULTILINE)
# The pattern lists the names, because a pattern for any label would be tried at each letter of a long label, which is slow.
_LABELS = (*RANKS, "block_size", "num_gpu_blocks")
_LABEL = re.compile(rf'\b({"|".join(_LABELS)})="([^"\\]*)"')
_NUMBER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class UpstreamRankLoad:
    """The load of one DP rank of an upstream, as the upstream's metrics report it."""

    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None  # share from 0 to 1; None: not reported


@dataclass(frozen=True, slots=True)
class UpstreamReport:
    """The values of one read of an upstream's metrics."""

    ranks: tuple[UpstreamRankLoad, ...]  # one entry per DP rank, in rank order
    block_tokens: int | None = None  # None: not reported
    kv_blocks: int | None = None  # number of KV blocks of one rank; None: not reported


def read_metrics(text: str) -> UpstreamReport | None:
    """Parse the text of /metrics. Return None if no known metric contains the number of running requests."""
    found: tuple[dict[str, float], ...] = ({}, {}, {})
    about: dict[str, str] = {}
    for name, labels, value in _samples(text):
        if name == KV_BLOCKS:
            about = about or labels
            continue
        into, rank = found[_INTO[name]], next((labels[label] for label in RANKS if label in labels), "0")
        # SGLang reports the same value once per GPU of a rank. Each process of a server reports the values of the shared engine.
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
    """Yield the name, labels and value of each used sample. Skip values that are not numbers from 0 to 10⁹ (MOST)."""
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
    """The last report of an upstream's load, from which the upstream's current load is estimated."""

    stale_s: float = STALE_S  # an older report is ignored
    report: UpstreamReport | None = None
    at: float = float("-inf")  # time of the report, in seconds of any monotonic clock
    own: int = 0  # number of this worker's requests at the upstream at that time

    def take(self, report: UpstreamReport | None, own: int, now: float) -> None:
        """Store a report that was read at the time `now`.

        `own` is the number of this worker's requests at the upstream at that time. A report of None, from a failed read, is
        ignored.
        """
        if report is not None:
            self.report, self.own, self.at = report, own, now

    def fresh(self, now: float) -> UpstreamReport | None:
        """Return the last report, or None if there is none or it is too old."""
        return self.report if now - self.at <= self.stale_s else None

    def combined(self, own: Load, batch_max: int, now: float) -> Load:
        """Return the load of the whole upstream, or `own` if there is no recent report.

        The load consists of other clients' requests, as of the last report, and of this worker's current requests.

        Args:
            own: the current load of this worker's requests.
            batch_max: how many requests the upstream is assumed to run at once, if the report shows none waiting.
            now: the current time, by the clock of `take`.
        """
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
    """Return the load of each DP rank of an upstream. Each rank has `kv_blocks` KV blocks.

    The number of used blocks is computed from the reported usage. The number of tokens is 0, because metrics do not contain it.
    """
    return [
        Load(rank.running, rank.waiting, round(min(1.0, rank.kv_usage or 0.0) * kv_blocks), kv_blocks)
        for rank in report.ranks
    ]
