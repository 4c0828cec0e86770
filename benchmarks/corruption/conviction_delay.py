"""Computes the canary intervals from a fault to the conviction, over all phases of the schedule.

The schedule is the controller's own. A fault is permanent and greedy answers repeat, so the first question that detects it
convicts, at once: the confirming repetition runs within the same slot. A sampled canary takes a slot and does not count here.

Note: a fault is placed right after a slot, its worst moment in that interval. A later one is detected that much sooner.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from controller.adapters.clock import SystemClock
from controller.deciders.fleet import Fleet, evolve
from controller.deciders.golden import Golden
from controller.ports import OthersWork
from controller.runtime.canary.goldens import Vocabulary
from controller.runtime.canary.runner import CanaryRunner
from controller.runtime.canary.tools import ProberDependencies
from controller.runtime.canary.turn import CanaryTurn
from controller.runtime.settings import CanarySettings
from events.fact import Recorded
from events.journal.discarding import DiscardingJournal
from events.observations import CheckType, Profile, TopK, WorkerJoined, canary_key
from events.wire import Chunk, Generate, Logprob

ROUNDS = 4  # of the schedule, which repeats itself earlier
SAMPLED = ""  # a slot with a sampled canary


@dataclass(frozen=True, slots=True)
class Question:
    """A canary with its right answer."""

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...]


class RightAnswers:
    """A prober with a worker that always answers correctly. It records the question of each slot."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._by_prompt = {one.prompt: one for one in questions}
        self.slots: list[str] = []

    async def ask(self, worker: str, request: Generate) -> AsyncGenerator[Chunk]:
        """Answer at once."""
        asked = self._by_prompt[tuple(request.tokens)]
        self.slots.append(SAMPLED if request.sampling.temperature else asked.id)
        pairs = list(zip(asked.tokens, asked.top_k, strict=True))
        for n, (token, top) in enumerate(pairs):
            finish: Literal["length"] | None = "length" if n == len(pairs) - 1 else None
            yield Chunk(0, [token], finish=finish, logprobs=[Logprob(top[0][1], list(top))])

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        """Know nothing of other requests."""
        return ""


class Unmeasured:
    """A meter that discards its input."""

    def count_probe(self, worker: str, check_type: CheckType, seconds: float) -> None:
        """Count nothing."""

    def spent(self, worker: str, gpu_seconds: float) -> None:
        """Count nothing."""

    def late(self, seconds: float) -> None:
        """Count nothing."""


def schedule(questions: Sequence[Question], settings: CanarySettings) -> list[str]:
    """Return the ids of a worker's questions, slot after slot, as the controller's runner chooses them."""
    return asyncio.run(_asked(questions, settings))


async def _asked(questions: Sequence[Question], settings: CanarySettings) -> list[str]:
    prober, clock = RightAnswers(questions), SystemClock()
    joined = _joined()
    fleet = evolve(Fleet(), Recorded(1, clock.now(), joined, "1"))
    key = joined.canary_key
    goldens = {
        (key, q.id): Golden(key, q.id, "agreed", q.prompt, q.tokens, q.top_k, asked=len(q.tokens))
        for q in questions
    }
    fleet = Fleet(workers=fleet.workers, goldens=goldens)

    async def vocabulary(tokenizer: str) -> Vocabulary:
        return Vocabulary(lambda text: list(text.encode()), 256)

    tools = ProberDependencies(
        DiscardingJournal(), prober, clock, Unmeasured(), vocabulary, leading=lambda: True
    )
    runner = CanaryRunner(lambda: (fleet, 0), tools, settings)
    turn = CanaryTurn()
    for _ in range(ROUNDS * len(questions) * max(1, settings.sampled_every)):
        await runner.probe(fleet.workers[joined.worker], turn, "scheduled")
    return prober.slots


def _joined() -> WorkerJoined:
    identity: dict[str, Any] = {
        "model": "tiny", "revision": "r1", "tokenizer": "tiny", "engine": "transformers", "engine_version": "1",
        "dtype": "fp32", "tp": 1, "device": "cpu",
    }  # fmt: skip
    profile = Profile(
        kv_blocks=1000, block_tokens=16, max_batch=8, prefill_tokens_per_s=1e4, tpot_ms=((1, 10.0),)
    )
    return WorkerJoined(
        worker="w1",
        instance="w1-1",
        canary_key=canary_key(**identity),
        url="tcp://127.0.0.1:1",
        pid=1,
        profile=profile,
        **identity,
    )


def delays(slots: Sequence[str], noticing: Collection[str]) -> list[int]:
    """Return, for each phase of the schedule's first half, the intervals until a question in `noticing` is sent."""
    assert any(one in noticing for one in slots[len(slots) // 2 :])
    return [
        next(n for n, one in enumerate(slots[phase:], 1) if one in noticing)
        for phase in range(len(slots) // 2)
    ]


def figures(found: Sequence[int], interval_s: float) -> dict[str, float]:
    """Return the percentiles of delays, in intervals and in seconds."""
    ordered = sorted(found)
    quantiles = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    intervals = {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in quantiles.items()
    }
    return {
        **{f"{name}_intervals": float(value) for name, value in intervals.items()},
        **{f"{name}_s": value * interval_s for name, value in intervals.items()},
    }


def compared(
    questions: Sequence[Question],
    noticed: Sequence[tuple[Collection[str], Collection[str]]],
    settings: CanarySettings,
) -> dict[str, Any]:
    """Compare the delay under the current rules with that of 0.2.0.

    `noticed`: for each fault, the questions that detect it under the rules of 0.2.0 and under the current ones. Only faults that
    both detect have both delays; faults that only one detects are counted.
    """
    before = schedule(questions, settings.model_copy(update={"sampled_every": 0}))
    today = schedule(questions, settings)
    both = [(old, new) for old, new in noticed if old and new]
    result: dict[str, Any] = {
        "interval_s": settings.interval_s,
        "faults": len(both),
        "caught_by_0_2_0_alone": sum(bool(old) and not new for old, new in noticed),
        "caught_today_alone": sum(bool(new) and not old for old, new in noticed),
        "slots_0_2_0": before[:12],
        "slots_today": today[:12],
    }
    if not both:
        return result
    result["0.2.0"] = figures([n for old, _ in both for n in delays(before, old)], settings.interval_s)
    result["today"] = figures([n for _, new in both for n in delays(today, new)], settings.interval_s)
    result["difference"] = {
        name: round(value - result["0.2.0"][name], 3) for name, value in result["today"].items()
    }
    return result


def table(result: Mapping[str, Any]) -> str:
    """Return the delays as markdown."""
    if "today" not in result:
        return "no fault was detected under both rules: no delays"
    lines = ["| conviction delay, intervals (s) | p50 | p99 | largest |", "|---|---|---|---|"]
    for name in ("0.2.0", "today", "difference"):
        cells = (
            f"{result[name][f'{q}_intervals']:g} ({result[name][f'{q}_s']:g})" for q in ("p50", "p99", "max")
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
