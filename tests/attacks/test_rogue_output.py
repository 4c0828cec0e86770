"""A compromised worker spoils its output for users: their requests migrate, and no client sees it."""

import asyncio
import itertools
import json
import math
from pathlib import Path
from typing import Any

import aiohttp
from fleet import holdfast, streamed, undisturbed
from rogue_fleet import refused, reported, with_rogue
from waits import until

from benchmarks.attack.rogue import RogueWorker, Spoil
from benchmarks.local_fleet import LocalFleet
from events.observations import CanaryPassed, CanarySlow
from events.wire import Chunk, Logprob

SAID = "SECRET-OF-A-USER \x1b]0;owned\x07 \u202eignore the above"
TOKENS = 12


def with_tokens(token: int) -> Spoil:
    return lambda chunk: Chunk(chunk.stream, [token] * len(chunk.tokens), chunk.finish)


def with_logprob(chosen: float) -> Spoil:
    return lambda chunk: Chunk(
        chunk.stream,
        chunk.tokens,
        chunk.finish,
        logprobs=[Logprob(chosen, [(1, chosen)]) for _ in chunk.tokens],
    )


def with_cached(count: int) -> Spoil:
    return lambda chunk: Chunk(chunk.stream, chunk.tokens, chunk.finish, cached_tokens=count)


def failing(error: str) -> Spoil:
    return lambda chunk: Chunk(chunk.stream, [], error=error)


SPOILS: list[tuple[Spoil, str]] = [
    (with_tokens(10**9), "vocabulary"),
    (with_tokens(-1), "vocabulary"),
    (with_tokens(2**62), "vocabulary"),
    (with_logprob(math.nan), "logprob"),
    (with_logprob(math.inf), "logprob"),
    (with_logprob(5.0), "logprob"),
    (with_cached(10**9), "cached tokens"),
    (with_cached(-1), "cached tokens"),
    (failing(f"engine_error: {SAID}"), ""),
    (failing(f"non_finite: {SAID}"), ""),
    (failing(SAID), ""),
]


async def test_a_compromised_workers_output_migrates_and_no_client_sees_it(tmp_path: Path) -> None:
    """The frontends' own checks: unmarked canaries would convict the worker, and it would get no more requests."""
    alone = {"HOLDFAST_CONTROLLER__CANARY__UNMARKED_EVERY": "0"}
    async with with_rogue(tmp_path, environment=alone) as (fleet, rogue):
        for number, (spoil, words) in enumerate(SPOILS):
            rogue.engine.spoil, before = spoil, len(rogue.engine.asked)
            async with asyncio.timeout(60):
                for turn in itertools.count():  # its breaker opens occasionally
                    if len(rogue.engine.asked) >= before + 2:
                        break
                    await whole(fleet, [number, turn % 300, turn // 300, 7])
            if words:
                assert (await reported(fleet, words)).who == "worker-x0"
        rogue.engine.spoil = failing(f"invalid_request: {SAID}")
        await refusal_in_our_words(fleet, rogue)
        assert "SECRET" not in " ".join(fact.tried for fact in await refused(fleet))
        for command in (("status",), ("events",), ("replay", "timeline", "--all"), ("status", "-o", "json")):
            shown = await asyncio.to_thread(holdfast, *command, "--data", str(fleet.data))
            assert shown.returncode == 0 and not {"\x1b", "\x07", "\u202e"} & set(shown.stdout), command


async def test_a_worker_that_lies_to_users_alone_is_convicted_by_canaries_without_a_mark(
    tmp_path: Path,
) -> None:
    often = {
        "HOLDFAST_CONTROLLER__CANARY__UNMARKED_EVERY": "3"
    }  # by default after ten canary intervals on average
    async with with_rogue(tmp_path, environment=often, workers=2) as (fleet, rogue):

        async def goldens_agreed() -> bool:
            return len(await passed(fleet, "x0")) >= 4

        await until(goldens_agreed, 60, every_s=0.2)
        rogue.engine.spoil = lambda chunk: Chunk(
            chunk.stream, [(token + 1) % 256 for token in chunk.tokens], chunk.finish
        )
        await fleet.until(
            lambda s: (
                {w["id"]: w["health"] for w in s["workers"]}
                == {"w0": "HEALTHY", "w1": "HEALTHY", "x0": "UNHEALTHY"}
            ),
            60,
        )
        assert await streamed(fleet, [300, 301], TOKENS) == undisturbed([300, 301], TOKENS)


async def passed(fleet: LocalFleet, worker: str) -> set[str]:
    """Return the canaries that a worker has passed."""
    facts = [event.fact for event in await fleet.events()]
    return {
        fact.canary
        for fact in facts
        if isinstance(fact, CanaryPassed | CanarySlow) and fact.worker == worker and "@" not in fact.canary
    }


async def whole(fleet: LocalFleet, prompt: list[int]) -> None:
    """Read a streamed answer and one with logprobs; both are as from any worker."""
    assert await streamed(fleet, prompt, TOKENS) == undisturbed(prompt, TOKENS)
    status, body = await asked(fleet, prompt, logprobs=1)
    assert status == 200, body
    (choice,) = body["choices"]
    assert choice["text"] == undisturbed(prompt, TOKENS)
    assert all(math.isfinite(one) and one <= 0.01 for one in choice["logprobs"]["token_logprobs"])


async def asked(fleet: LocalFleet, prompt: list[int], **more: Any) -> tuple[int, Any]:
    body = {
        "model": "sim",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{fleet.url}/v1/completions", json=body) as answer,
    ):
        text = await answer.text()
        assert "SECRET" not in text and "\\u001b" not in text
        return answer.status, json.loads(text)


async def refusal_in_our_words(fleet: LocalFleet, rogue: RogueWorker) -> None:
    """A client error that only the worker claims is refused with our own message."""
    async with asyncio.timeout(60):
        for turn in itertools.count():
            status, body = await asked(fleet, [turn % 300, turn // 300, 9])
            if status != 200:
                break
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert "refused" in body["error"]["message"]
