"""After any failure at any time, the client gets the same tokens as from an undisturbed worker.

Random faults at random points, many requests at once, four workers. A failing seed is reported.
"""

import asyncio
import random
from collections import deque
from string import ascii_lowercase

import pytest
from frontend_kit import TOKENS, Kit, frontend, text_of
from json_types import Json
from scripted_worker import Act, ScriptedWorker, undisturbed

from controller.frontend.settings import LocalBreakerSettings
from events.observations import RequestAbandoned, RequestMigrated

FAULTS = ("error", "error", "error", "error", "disconnect")
ERRORS = ("engine_error", "engine_shutdown", "overloaded", "non_finite")
REQUESTS = 40


def acts(dice: random.Random) -> deque[Act]:
    """Return how a worker serves its next requests: most of them fail."""
    made: deque[Act] = deque()
    for _ in range(REQUESTS):
        per_step = dice.choice((1, 1, 2, 5))
        if dice.random() < 0.7:
            after = dice.randrange(0, 20)
            # Each error has its own text: a request that fails in the same way on two workers is considered the cause.
            error = f"{dice.choice(ERRORS)}: {''.join(dice.choices(ascii_lowercase, k=8))}"
            made.append(Act(after, dice.choice(FAULTS), error, per_step=per_step))
        else:
            made.append(Act(per_step=per_step))
    return made


async def ask(kit: Kit, dice: random.Random, number: int) -> tuple[str, str]:
    """Return the received and the expected text."""
    prompt = [300 + number, 301, 302 + dice.randrange(100)]
    count = dice.randrange(1, 30)
    whole = TOKENS.decode(undisturbed(prompt, count))
    body: Json = {"model": "m", "prompt": prompt, "max_tokens": count}
    if dice.random() < 0.4 and len(whole) > 8:
        at = dice.randrange(len(whole) - 4)
        body["stop"] = [whole[at : at + 4], "never generated"]
        whole = whole[: whole.index(body["stop"][0])]
    if dice.random() < 0.3:
        body["logprobs"] = 1
    if dice.random() < 0.5:
        status, answer, _ = await kit.post("/v1/completions", **body)
        assert status == 200, answer
        return answer["choices"][0]["text"], whole
    events = await kit.stream(**body)
    assert events[-1] == {"done": True}, events[-1]
    return text_of(events), whole


@pytest.mark.parametrize("seed", range(6))
async def test_every_answer_is_exact(seed: int) -> None:
    dice = random.Random(seed)
    workers = [ScriptedWorker(f"w{n}", acts=acts(dice), step_s=0.001) for n in range(4)]
    never = LocalBreakerSettings(failures_max=10_000)
    async with frontend(*workers, migration_limit=50, breaker=never, reroute_s=5.0) as kit:
        # the last resort: a request avoids workers that failed it
        steady = ScriptedWorker("w9", step_s=0.001)
        await kit.add(steady)
        answers = await asyncio.gather(*(ask(kit, random.Random(seed * 100 + n), n) for n in range(REQUESTS)))
        for got, expected in answers:
            assert got == expected, f"seed {seed}"
        assert kit.said(RequestAbandoned) == []
        assert len(kit.said(RequestMigrated)) >= 3
        assert all(fact.exact for fact in kit.said(RequestMigrated))
        assert all(
            endpoint.active == 0 and endpoint.tokens == 0
            for endpoint in kit.director.table.endpoints.values()
        )
        assert (
            not kit.director.driver.waiting.parked
            and not kit.director.driver.waiting.unbegun
            and not kit.api.openai.completions
        )
