"""The progress of an upstream is measured in tokens.

Bytes without tokens renew nothing. A server that brings tokens is alive, whatever its health checks return.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from engine_contract import Rig, prompt
from upstream import Upstream
from waits import until

from workers.engines.engine import EngineDead
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.upstream_health import REFUSALS_MAX, HealthAnswer, UpstreamHealth

GOOD, SLOW, REFUSED = (
    HealthAnswer(),
    HealthAnswer("/health does not answer within 8 s", timed_out=True),
    HealthAnswer("/health answers 503"),
)


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = await Upstream().start()
    yield server
    await server.stop()


@pytest.fixture
async def rig(upstream: Upstream) -> AsyncIterator[Rig]:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url)))
    await rig.start()
    yield rig
    await rig.engine.stop()


async def test_comments_of_an_upstream_do_not_renew_the_age_of_its_step(upstream: Upstream, rig: Rig) -> None:
    upstream.fault = "pings"
    key = rig.submit(prompt())
    await rig.until(lambda: len(rig.answers[key].tokens) == 3)
    since = rig.engine.phase().since
    await until(lambda: upstream.comments > 20)
    assert rig.engine.phase().since == since
    upstream.after = 0
    rig.submit(prompt(salt=1))
    await rig.until(lambda: len(upstream.bodies) == 2)
    await until(lambda: upstream.comments > 40)
    assert rig.engine.phase().since == since


async def test_tokens_of_one_stream_renew_the_age_of_the_step(upstream: Upstream, rig: Rig) -> None:
    upstream.token_s = 0.01
    key = rig.submit(prompt())
    await rig.until(lambda: len(rig.answers[key].tokens) == 3)
    since = rig.engine.phase().since
    await rig.until(lambda: len(rig.answers[key].tokens) > 5)
    assert rig.engine.phase().since > since


def judged(health: UpstreamHealth, answer: HealthAnswer, at: float, token_at: float = 0.0) -> str:
    """Judge a check of 8 s that ends at this time."""
    return health.judge(answer, at - 8, token_at, at)


def test_a_server_that_brings_tokens_is_alive_without_health_answers() -> None:
    health = UpstreamHealth(30.0)
    for at in range(100, 1000, 10):
        assert judged(health, SLOW, at, token_at=at - 1) == ""


def test_a_server_that_brings_tokens_is_alive_with_refused_health_checks() -> None:
    health = UpstreamHealth(30.0)
    for at in range(100, 1000, 10):
        assert judged(health, REFUSED, at, token_at=at - 1) == ""


def test_a_server_is_dead_after_long_silence_and_a_timeout_is_no_refusal() -> None:
    health = UpstreamHealth(30.0)
    verdicts = [judged(health, SLOW, at, token_at=90) for at in (100, 110, 120)]
    assert verdicts == ["", "", ""]
    assert judged(health, SLOW, 130, token_at=90) == f"{SLOW.trouble}, and no token came for 38 s"


def test_a_late_answer_or_a_token_restarts_the_silence() -> None:
    for answer, token_at in ((GOOD, 0.0), (SLOW, 125.0)):
        health = UpstreamHealth(30.0)
        assert [judged(health, SLOW, at) for at in (100, 110, 120)] == ["", "", ""]
        assert judged(health, answer, 130, token_at) == ""
        assert [judged(health, SLOW, at, token_at) for at in (140, 150)] == ["", ""]
        assert judged(health, SLOW, 175, token_at)


def test_consecutive_refusals_are_dead_and_a_timeout_does_not_reset_them() -> None:
    health = UpstreamHealth(30.0)
    answers = [REFUSED, SLOW] * (REFUSALS_MAX - 1)
    assert not any(judged(health, answer, 100 + 10 * n) for n, answer in enumerate(answers[:-1]))
    assert judged(health, REFUSED, 125) == REFUSED.trouble


async def test_a_busy_server_without_health_answers_stays_in_service(upstream: Upstream, rig: Rig) -> None:
    upstream.answers, upstream.token_s = False, 0.01
    key = rig.submit(prompt(), max_tokens=500)
    checks = [asyncio.create_task(rig.engine.check()) for _ in range(5)]
    await rig.until(lambda: upstream.checks == 5 and len(rig.answers[key].tokens) > 20)
    upstream.release.set()
    await asyncio.gather(*checks)


async def test_an_unreachable_server_is_dead_after_three_refused_checks(upstream: Upstream, rig: Rig) -> None:
    await upstream.stop()
    for _ in range(REFUSALS_MAX - 1):
        await rig.engine.check()
    with pytest.raises(EngineDead, match="cannot be reached"):
        await rig.engine.check()
