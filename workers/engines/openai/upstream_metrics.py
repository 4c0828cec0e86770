"""How loaded is an upstream, by its own account? What its `/metrics` says, read every second.

An upstream may have other clients than us, it knows what waits and what runs, and how full its KV cache is; we only know
what we have sent. What it says is believed for a few seconds: later it is as good as unsaid.

             vLLM                          SGLang                    llama-server
running      vllm:num_requests_running     sglang:num_running_reqs   llamacpp:requests_processing
waiting      vllm:num_requests_waiting     sglang:num_queue_reqs     llamacpp:requests_deferred
KV in use    vllm:kv_cache_usage_perc (1)  sglang:token_usage        llamacpp:kv_cache_usage_ratio
KV blocks    vllm:cache_config_info

(1) of 1; `vllm:gpu_cache_usage_perc` in earlier versions
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from events.wire import Load

EVERY_S = 1.0
STALE_S = 5.0
MOST = 1e9  # of anything: what is more is no count, and would not fit into our messages

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
KV_USAGE = (
    "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio",
)  # fmt: skip
KV_BLOCKS = "vllm:cache_config_info"
RANKS = ("engine", "dp_rank")  # the labels that tell DP ranks apart
_INTO = {name: place for place, names in enumerate((RUNNING, WAITING, KV_USAGE)) for name in names}
_SAMPLE = re.compile(rf"^({'|'.join([*_INTO, KV_BLOCKS])})(?:\{{(.*)\}})?[ \t]+(\S+)", re.MULTILINE)
_LABELS = (*RANKS, "block_size", "num_gpu_blocks")  # by name: anything long would be tried at each letter
_LABEL = re.compile(rf'\b({"|".join(_LABELS)})="([^"\\]*)"')
_NUMBER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class UpstreamRankLoad:
    """One DP rank's load."""

    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None  # of 1


@dataclass(frozen=True, slots=True)
class UpstreamReport:
    """What an upstream has said once. By DP rank, in their order."""

    ranks: tuple[UpstreamRankLoad, ...]
    block_tokens: int | None = None
    kv_blocks: int | None = None  # of one rank


def read_metrics(text: str) -> UpstreamReport | None:
    """Return what an exposition says of the load; None if it is of no server that we know."""
    found: tuple[dict[str, float], ...] = ({}, {}, {})
    about: dict[str, str] = {}
    for name, labels, value in _samples(text):
        if name == KV_BLOCKS:
            about = about or labels
            continue
        into, rank = found[_INTO[name]], next((labels[label] for label in RANKS if label in labels), "0")
        # SGLang says the same for each GPU of a rank, and each process of a server for the engine that all share.
        into[rank] = max(into.get(rank, 0.0), value)
    running, waiting, usage = found
    if not running:
        return None
    order = sorted(running, key=lambda rank: (len(rank), rank))
    loads = [
        UpstreamRankLoad(round(running[rank]), round(waiting.get(rank, 0.0)), usage.get(rank))
        for rank in order
    ]
    return UpstreamReport(
        tuple(loads), _number(about.get("block_size")), _number(about.get("num_gpu_blocks"))
    )


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the samples that we read: name, labels, value. What is no number is passed over."""
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
    """The last that was said, when (seconds of any clock that only goes forward), and what we had sent by then."""

    stale_s: float = STALE_S  # what was said longer ago counts no more
    said: UpstreamReport | None = None
    at: float = float("-inf")
    own: int = 0

    def take(self, said: UpstreamReport | None, own: int, now: float) -> None:
        """Take in one read; None: it failed."""
        if said is not None:
            self.said, self.own, self.at = said, own, now

    def fresh(self, now: float) -> UpstreamReport | None:
        """Return what was said, unless it is too old."""
        return self.said if now - self.at <= self.stale_s else None

    def combined(self, own: Load, batch_max: int, now: float) -> Load:
        """Return the load of a whole upstream: what others had there when it last said so, and what we have there now."""
        said = self.fresh(now)
        if said is None:
            return own
        running, waiting = sum(rank.running for rank in said.ranks), sum(rank.waiting for rank in said.ranks)
        total = own.running + own.waiting + max(0, running + waiting - self.own)
        at_once = running if waiting else max(running, batch_max)
        usages = [rank.kv_usage for rank in said.ranks if rank.kv_usage is not None]
        used = round(min(1.0, sum(usages) / len(usages)) * own.kv_total) if usages else own.kv_used
        return Load(
            min(total, at_once), max(0, total - at_once), used, own.kv_total, own.active_tokens, own.canaries
        )


def rank_loads(said: UpstreamReport, kv_blocks: int) -> list[Load]:
    """Return each rank's load, of `kv_blocks` blocks each. Tokens are not said; blocks follow from the usage."""
    return [
        Load(rank.running, rank.waiting, round(min(1.0, rank.kv_usage or 0.0) * kv_blocks), kv_blocks)
        for rank in said.ranks
    ]
