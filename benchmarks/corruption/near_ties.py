"""Counts convictions of correct workers by near ties, in simulated worker-years of canaries.

    python -m benchmarks near_ties [--years 30] [--rates 0.001 0.01 0.05 0.2] [--seed 1]

Three things that could convict a correct worker, each for at least `--years` worker-years at a canary every 30 s:

- tokens: goldens with near ties in them, as an earlier version recorded them. Every probe draws a flip at each near tie and
  noise on every logprob, and the controller's own comparison judges the answer (`CanarySet.judge`). Outcomes are drawn
  in bulk; each distinct one is judged once.
- blind: an engine without logprobs. Fleets of two workers, each with a controller that restarts once a week and then forgets the
  ties that it had found. Recording and confirmation are the controller's own code (`ask_until_sure`, `HiddenTies`).
- sampled: sampled canaries of a correct sampler, judged by `SamplingCheck.ask` until chance is excluded or explains them. The
  expected number follows from the setting (`sampled_chance`); the simulation checks the rate at a far larger chance.

Prints one JSON object; exits with 1 if a correct worker was convicted.
"""

import argparse
import asyncio
import json
import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from controller.deciders.golden import Golden
from controller.runtime.canary.canary_set import CanarySet
from controller.runtime.canary.goldens import (
    Calibration,
    Canary,
    CanaryAnswer,
    GoldenDifference,
    HiddenTies,
    compare,
)
from controller.runtime.canary.probe import ProbeResult, ask_until_sure
from controller.runtime.canary.sampled import SamplingParameters, surprise
from controller.runtime.settings import CanarySettings
from events.observations import TopK

INTERVAL_S = 30.0
PER_YEAR = int(365.25 * 86_400 / INTERVAL_S)
PER_WEEK = int(7 * 86_400 / INTERVAL_S)
TOKENS, LISTED = 32, 5
QUESTIONS = 200  # different ones, each with its own near ties
TIES = (1, 2, 3)  # near ties of a question
TIE_MAX = 0.05  # of logprobs: a lead up to this is a near tie, and may flip
NOISE = 0.002  # of a logit, either way
VARIANTS = 24  # of the noise, per question and outcome
FIRST, OTHER = 1000, 2000  # ids of the expected tokens, and of the tokens after a flipped tie


def row(lead: float, place: int, draw: random.Random, noise: float = 0.0) -> TopK:
    """Return a position's logprobs: the expected token leads the next one by `lead`."""
    logits = [0.0, -lead, *(-4.0 - 0.5 * n for n in range(LISTED - 2))]
    logits = [value + draw.uniform(-noise, noise) for value in logits]
    total = math.log(sum(map(math.exp, logits)))
    ids = [FIRST + place, OTHER + place, *(3000 + n for n in range(LISTED - 2))]
    return tuple(sorted(((id, v - total) for id, v in zip(ids, logits, strict=True)), key=lambda p: -p[1]))


class Question:
    """One canary of a correct engine, with its golden and its near ties."""

    def __init__(self, number: int, draw: random.Random) -> None:
        self.leads = [draw.uniform(0.3, 8.0) for _ in range(TOKENS)]
        self.ties = sorted(draw.sample(range(TOKENS), draw.choice(TIES)))
        for place in self.ties:
            self.leads[place] = draw.uniform(0.0, TIE_MAX)
        self.canary = Canary(f"q{number}", (1, 2, 3), TOKENS)
        tokens, top_k = self.answer(None, draw)
        self.golden = Golden("key", self.canary.id, "agreed", (1, 2, 3), tokens, top_k)

    def answer(self, flipped: int | None, draw: random.Random) -> tuple[tuple[int, ...], tuple[TopK, ...]]:
        """Return the engine's answer if the tie at this position is the first to flip."""
        tokens = [FIRST + place for place in range(TOKENS)]
        top_k = [row(lead, place, draw, NOISE) for place, lead in enumerate(self.leads)]
        if flipped is not None:  # all later tokens are another text
            tokens[flipped] = OTHER + flipped
            for place in range(flipped + 1, TOKENS):
                tokens[place], top_k[place] = 7000 + place, row(3.0, 4000 + place, draw)
        return tuple(tokens), tuple(top_k)


def canary_set(questions: Sequence[Question], draw: random.Random, tie_margin: float) -> CanarySet:
    """Return the controller's canary set of these questions, with a tolerance calibrated from correct answers."""
    settings = CanarySettings(tie_margin=tie_margin)
    made = CanarySet("key", settings, (), tuple(q.canary for q in questions), Calibration(settings))
    while not made.calibration.enough:
        one = draw.choice(questions)
        tokens, top_k = one.answer(None, draw)
        found = compare(
            CanaryAnswer(tokens, top_k), tokens=one.golden.tokens, top_k=one.golden.top_k, tolerance=0.0
        )
        made.calibration.add(found.distance or 0.0, f"w{draw.randrange(4)}")
    return made


def by_tokens(
    rate: float,
    years: float,
    seed: int,
    number: int = QUESTIONS,
    variants: int = VARIANTS,
    tie_margin: float = 0.1,
) -> dict[str, Any]:
    """Judge goldens with near ties in them, with several draws of the noise for each outcome."""
    draw, luck = random.Random(f"{seed}/{rate}"), np.random.default_rng([seed, int(rate * 1e6)])
    questions = [Question(one, draw) for one in range(number)]
    known = canary_set(questions, draw, tie_margin)
    asked = math.ceil(years * PER_YEAR / number)
    flips = evidence = 0
    for one in questions:
        chances = [rate * (1 - rate) ** n for n in range(len(one.ties))]
        outcomes = luck.multinomial(asked, [*chances, max(0.0, 1 - sum(chances))])
        flips += int(outcomes[:-1].sum())
        for place, count in zip([*one.ties, None], outcomes, strict=True):
            if not count:
                continue
            wrong = 0
            for _ in range(variants):
                answer = CanaryAnswer(*one.answer(place, draw))
                wrong += known.judge(one.canary, one.golden, answer).reason is not None
            evidence += int(
                luck.binomial(count, (wrong / variants) ** 2)
            )  # the repetition must be wrong as well
    return {
        "worker_years": round(asked * number / PER_YEAR, 1),
        "asked": asked * number,
        "flips": flips,
        "tolerance": known.calibration.tolerance,
        "false_convictions": evidence,
    }


class BlindQuestion:
    """A canary of an engine without logprobs, with one near tie."""

    def __init__(self, rate: float, draw: random.Random) -> None:
        self.rate, self.draw = rate, draw
        position = draw.randrange(1, TOKENS)
        self.usual = tuple(range(TOKENS))
        self.other = (*self.usual[:position], *range(900, 900 + TOKENS - position))
        self.golden = self.say()

    def say(self) -> tuple[int, ...]:
        """Return one answer."""
        return self.other if self.draw.random() < self.rate else self.usual

    async def ask(self, again: bool) -> ProbeResult:
        """Answer a probe that first deviated from the golden."""
        departing = self.other if self.golden == self.usual else self.usual
        return ProbeResult(1.0, CanaryAnswer(self.say() if again else departing))

    def judge(self, answer: CanaryAnswer) -> GoldenDifference:
        """Compare with the golden, as the controller does."""
        return compare(answer, tokens=self.golden, top_k=(), tolerance=0.0)


async def blindly(rate: float, years: float, seed: int) -> dict[str, Any]:
    """Simulate weeks of fleets of two workers with engines that return no logprobs."""
    draw, settings = random.Random(f"blind/{seed}/{rate}"), CanarySettings()
    weeks = math.ceil(years * 365.25 / 7)
    convicted = asked = 0
    for _ in range(weeks):
        ties = HiddenTies()
        for canary in range(settings.canaries):
            one = BlindQuestion(rate, draw)
            if any(one.say() != one.golden for _ in range(settings.blind_repeats - 1)):
                asked += settings.blind_repeats
                continue  # detected during recording: the golden ends before the tie
            departs = rate if one.golden == one.usual else 1 - rate
            for ask in range(PER_WEEK * 2 // settings.canaries):
                asked += 1
                if draw.random() >= departs:
                    continue  # the expected answer
                verdict = await ask_until_sure(
                    one.ask, one.judge, settings.max_retries, settings.blind_repeats
                )
                convicted += verdict.confirmed
                place = verdict.worst.position
                found = verdict.both_ways and place is not None
                if found and ties.note(f"c{canary}", place or 0, f"w{ask % 2}", alone=False):
                    break  # from now on compared only up to the tie
    return {"worker_years": round(weeks * 2 * 7 / 365.25, 1), "asked": asked, "false_convictions": convicted}


def sampled(seed: int, answers: int) -> dict[str, Any]:
    """Draw answers of a correct sampler, and count small p-values."""
    draw, how = random.Random(f"sampled/{seed}"), SamplingParameters(0.7, 0.95)
    questions = [Question(number, draw) for number in range(QUESTIONS)]
    small = {0.05: 0, 0.01: 0, 0.001: 0}
    for _ in range(answers):
        one = draw.choice(questions)
        got: list[int] = []
        for place, lead in enumerate(one.leads):
            top = row(lead, place, draw, NOISE)
            rest = max(0.0, 1 - sum(math.exp(value) for _, value in top))
            weights = [*(math.exp(value / how.temperature) for _, value in top), rest]
            got += draw.choices([*(id for id, _ in top), 9999], weights)
            if got[-1] != FIRST + place:
                break
        p = surprise(one.golden.top_k, one.golden.tokens, got, how, 0.0)
        for limit in small:
            small[limit] += p <= limit
    settings = CanarySettings()
    yearly = PER_YEAR / settings.sampled_every * settings.sampled_chance
    return {
        "answers": answers,
        "share_at_most": {str(limit): round(count / answers, 6) for limit, count in small.items()},
        "valid": all(count <= answers * p + 4 * math.sqrt(answers * p) for p, count in small.items()),
        "false_convictions_per_worker_year": float(f"{yearly:.2g}"),
    }


def measured(
    rates: Sequence[float], years: float, seed: int, answers: int = 50_000, number: int = QUESTIONS
) -> dict[str, Any]:
    """Measure everything."""
    return {
        "tokens": {f"{rate:.1%}": by_tokens(rate, years, seed, number) for rate in rates},
        "blind": {f"{rate:.1%}": asyncio.run(blindly(rate, years, seed)) for rate in rates},
        "sampled": sampled(seed, answers),
    }


def convictions(result: dict[str, Any]) -> int:
    """Return how many correct workers were convicted, over all rates."""
    return sum(one["false_convictions"] for kind in ("tokens", "blind") for one in result[kind].values())


def main() -> int:
    """Run, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--years", type=float, default=30, help="simulated worker-years at each rate (default: 30)"
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[0.001, 0.01, 0.05, 0.2],
        help="flip rates of near-tied tokens",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all draws (default: 1)")
    args = parser.parse_args()
    result = measured(args.rates, args.years, args.seed)
    print(json.dumps(result, indent=1))
    return 1 if convictions(result) or not result["sampled"]["valid"] else 0


if __name__ == "__main__":
    sys.exit(main())
