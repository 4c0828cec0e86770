"""`allowed_token_ids` and `bad_words` reach the workers: as tokens, or as texts for external servers."""

from typing import Any

import pytest
from frontend_kit import TOKENS, frontend
from scripted_worker import ScriptedWorker

from controller.frontend.errors import ApiError
from controller.frontend.openai.request_models import ALLOWED_TOKENS_MAX, BAD_WORDS_MAX
from controller.frontend.openai.request_parser import parse_completion

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
WORDS = ["me", "meme"]


async def sent(engine: str) -> Any:
    """Return the sampling parameters that a worker with this engine gets."""
    worker = ScriptedWorker()
    async with frontend() as kit:
        await kit.add(worker, engine=engine)
        await kit.complete("hi", 2, allowed_token_ids=[300, 301], bad_words=WORDS)
    return worker.requests[-1].sampling


async def test_own_engines_get_bad_words_as_tokens() -> None:
    sampling = await sent("simulated")
    assert (sampling.allowed_token_ids, sampling.bad_words) == ([300, 301], [])
    assert sampling.bad_word_tokens == TOKENS.word_tokens(WORDS)


async def test_external_servers_get_bad_words_as_texts() -> None:
    sampling = await sent("openai")
    assert (sampling.allowed_token_ids, sampling.bad_words) == ([300, 301], WORDS)
    assert sampling.bad_word_tokens == []


def test_a_word_is_spelled_at_the_beginning_and_after_a_space() -> None:
    begun, spaced = TOKENS.word_tokens(["  me"])
    assert (TOKENS.decode(begun), TOKENS.decode(spaced)) == ("me", " me")
    long = "memory of a river"
    assert TOKENS.word_tokens([long])[0] == TOKENS.encode(long, special=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [3] * (ALLOWED_TOKENS_MAX + 1)),
        ("bad_words", [" "]),
        ("bad_words", [""]),
        ("bad_words", ["x" * 65]),
        ("bad_words", ["x"] * (BAD_WORDS_MAX + 1)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_limits_out_of_bounds_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as found:
        parse_completion(COMPLETION | {field: value})
    assert (found.value.status, found.value.param) == (400, field)


async def test_an_allowed_token_outside_the_vocabulary_is_refused() -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, body, _ = await kit.post("/v1/completions", **COMPLETION, allowed_token_ids=[3, 5000])
    assert (status, body["error"]["param"]) == (400, "allowed_token_ids")
