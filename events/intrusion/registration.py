"""Checks workers' registrations and lists of adapters against bounds that no real engine exceeds.

A fact with a value outside its bounds is ignored when the fleet's state is computed from the journal
(`controller.deciders.fold`), so such a worker does not become part of the fleet. The codec does not refuse such a fact,
because readers of every version must accept the same events of a journal.
"""

from collections.abc import Iterator, Sequence
from math import isfinite

from events.fact import Fact
from events.observations import AdaptersChanged, Profile, WorkerJoined

BLOCKS_MAX = 1 << 32  # KV blocks of one worker
BLOCK_TOKENS_MAX = 1 << 20
REQUESTS_MAX = 1 << 24  # running in one engine step, or waiting
TOKENS_MAX = 1 << 30  # of a context, or of one engine step
PREFILL_MAX = 1e9  # tokens per second
TPOT_MS_MAX = 1e7  # nearly three hours per token
CURVE_MAX = 4096  # points of a TPOT curve
RANKS_MAX = 1 << 16  # TP or DP ranks
PID_MAX = 1 << 31
LIMIT_MAX = 1 << 31  # migrations of one request
NAMES_MAX = 64  # further names of a model, paths, or adapters
NAME_MAX = 256  # characters of one name or path

Claim = tuple[str, float, float, float]  # name, value, smallest and largest possible value


def impossible(fact: Fact) -> str:
    """Return the first impossible value of a registration or of a list of adapters, as `name = value`.

    Return an empty string if all values are possible, and for every other fact.
    """
    match fact:
        case WorkerJoined():
            claims = _claims(fact)
        case AdaptersChanged():
            claims = _of_names("adapters", fact.adapters)
        case _:
            return ""
    for name, value, least, most in claims:
        if not (isfinite(value) and least <= value <= most):
            return f"{name} = {value!r}"[:80]
    return ""


def _claims(joined: WorkerJoined) -> Iterator[Claim]:
    yield "context_tokens", joined.context_tokens, 1, TOKENS_MAX
    yield "tp", joined.tp, 1, RANKS_MAX
    yield "dp", joined.dp, 1, RANKS_MAX
    yield "pid", joined.pid, 0, PID_MAX
    yield from _optional("waiting_max", joined.waiting_max, REQUESTS_MAX)
    yield from _optional("migration_limit", joined.migration_limit, LIMIT_MAX)
    yield from _of_names("also_served", joined.also_served)
    yield from _of_names("paths", joined.paths)
    yield from _of_names("adapters", joined.adapters)
    yield from _of_profile(joined.profile)
    if (kv := joined.kv) is not None:
        for name, value in (("layers", kv.layers), ("kv_heads", kv.kv_heads), ("head_size", kv.head_size)):
            yield f"kv.{name}", value, 0, REQUESTS_MAX
        yield "kv.element_bytes", kv.element_bytes, 0, 64


def _of_names(field: str, names: Sequence[str]) -> Iterator[Claim]:
    yield f"number of {field}", len(names), 0, NAMES_MAX
    yield f"longest of {field}", max(map(len, names), default=0), 0, NAME_MAX


def _of_profile(profile: Profile) -> Iterator[Claim]:
    yield "profile.kv_blocks", profile.kv_blocks, 0, BLOCKS_MAX
    yield "profile.block_tokens", profile.block_tokens, 0, BLOCK_TOKENS_MAX
    yield "profile.max_batch", profile.max_batch, 0, REQUESTS_MAX
    yield "profile.prefill_tokens_per_s", profile.prefill_tokens_per_s, 0, PREFILL_MAX
    yield from _optional("profile.prefill_tokens_max", profile.prefill_tokens_max, TOKENS_MAX)
    yield "points of profile.tpot_ms", len(profile.tpot_ms), 0, CURVE_MAX
    for running, ms in profile.tpot_ms[:CURVE_MAX]:
        yield "running of profile.tpot_ms", running, 0, REQUESTS_MAX
        yield "profile.tpot_ms", ms, 0, TPOT_MS_MAX


def _optional(name: str, value: float | None, most: float) -> Iterator[Claim]:
    if value is not None:
        yield name, value, 0, most
