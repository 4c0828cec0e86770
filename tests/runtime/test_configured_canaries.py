"""A configured answer convicts a worker that contradicts it, unless all workers contradict it alike."""

import pytest
from canary_world import FakeWorker, World
from pydantic import ValidationError

from controller.runtime.settings import CanarySettings, ConfiguredCanary
from events.decisions import GoldenRetired
from events.observations import CanaryFailed, CanaryPassed, GoldenDisputed
from events.wire import Generate, Sampling

PROMPT = "The capital of France is"
TOKENS = 8
ASKED = [1, *PROMPT.encode()]


def said() -> tuple[int, ...]:
    """Return a healthy worker's answer."""
    request = Generate(0, "r", ASKED, 0, Sampling(max_tokens=TOKENS))
    return tuple(token for chunk in FakeWorker().chunks(request) for token in chunk.tokens)


def world(*names: str, expected: tuple[int, ...], **more: object) -> World:
    own = ConfiguredCanary.model_validate(
        {"prompt": PROMPT, "expected_tokens": expected, "max_tokens": TOKENS, **more}
    )
    made = World(CanarySettings(interval_s=5, canary_prompts=(own,)))
    for name in names:
        made.join(name)
    return made


async def test_a_configured_answer_that_all_workers_contradict_alike_convicts_none() -> None:
    made = world("w1", "w2", "w3", expected=(1, 2, 3))
    async with made.running():
        await made.until(lambda: bool(made.facts(GoldenRetired)), 60)
        await made.until(lambda: {made.status(name) for name in ("w1", "w2", "w3")} == {"HEALTHY"}, 60)
        asked = sum(worker.asked for worker in made.plane.workers.values())
        await made.pass_time(60)
        assert sum(worker.asked for worker in made.plane.workers.values()) > asked
    assert not made.facts(CanaryFailed)
    assert {made.fleet.workers[name].weight for name in ("w1", "w2", "w3")} == {1.0}
    disputes = made.facts(GoldenDisputed)
    assert {fact.proposed_by for fact in disputes} == {"configured"} and len(disputes) <= 3
    (retired,) = made.facts(GoldenRetired)
    assert "against the configured answer" in retired.reason


async def test_a_worker_that_contradicts_a_confirmed_configured_answer_is_convicted() -> None:
    made = world("w1", "w2", "w3", expected=said())
    made.plane.workers["w1"].corrupt = lambda request: list(request.tokens) == ASKED
    async with made.running():
        await made.until(lambda: made.status("w1") == "UNHEALTHY", 60)
        await made.until(lambda: made.status("w2") == made.status("w3") == "HEALTHY", 60)
    assert not made.facts(GoldenRetired)
    assert {fact.golden for fact in made.facts(CanaryFailed, "w1") if fact.confirmed} == {"agreed"}
    assert not made.facts(CanaryFailed, "w2") and made.facts(CanaryPassed, "w2")


async def test_for_a_lone_worker_the_configured_answer_decides() -> None:
    made = world("w1", expected=(1, 2, 3))
    async with made.running():
        await made.until(lambda: made.status("w1") == "UNHEALTHY", 30)
    assert not made.facts(GoldenDisputed)


async def test_a_range_that_all_workers_leave_alike_convicts_none() -> None:
    made = world("w1", "w2", expected=said(), check_logits=True, expected_top_logit_range=(-0.001, 0.0))
    async with made.running():
        await made.until(lambda: bool(made.facts(GoldenRetired)), 60)
        await made.until(lambda: made.status("w1") == made.status("w2") == "HEALTHY", 60)
    assert not made.facts(CanaryFailed)


async def test_a_worker_that_leaves_a_range_that_another_keeps_is_convicted() -> None:
    made = world("w1", "w2", expected=said(), check_logits=True, expected_top_logit_range=(-0.2, 0.0))
    made.plane.workers["w1"].drift = -0.5
    async with made.running():
        await made.until(lambda: made.status("w1") == "UNHEALTHY", 60)
        await made.until(lambda: made.status("w2") == "HEALTHY", 60)
    assert "top_logit=-0.51" in made.facts(CanaryFailed, "w1")[0].detail


@pytest.mark.parametrize("bounds", [(15.0, 25.0), (1500.0, 2500.0)])
def test_a_range_of_raw_logits_is_refused_with_an_explanation(bounds: tuple[float, float]) -> None:
    given = {"prompt": "a", "expected_tokens": (1,), "max_tokens": 1, "expected_top_logit_range": bounds}
    with pytest.raises(ValidationError, match="engines report logprobs, which are never above 0"):
        ConfiguredCanary.model_validate({**given, "check_logits": True})
    assert not ConfiguredCanary.model_validate(given).check_logits, "an unchecked range may have any value"
