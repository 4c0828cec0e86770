"""Invalid output of a worker never reaches a client."""

from math import inf, nan

import pytest
from frontend_kit import TOKENS, first_goes_to, frontend, text_of
from json_types import Json
from scripted_worker import ScriptedWorker, undisturbed

from controller.frontend.openai.choice import InvalidOutput
from controller.frontend.openai.writers import check_logprobs, check_tokens
from controller.frontend.request.failures import Failure, classify
from events.observations import RequestMigrated
from events.wire import Chunk, Generate, Logprob

PROMPT, COUNT = [300, 301], 9
WAYS: dict[str, Json] = {
    "streamed by table": {"stream": True},
    "streamed through a detokenizer": {"stream": True, "stop": ["never generated"]},
    "streamed with logprobs": {"stream": True, "logprobs": 1},
    "streamed with token ids": {"stream": True, "return_token_ids": True},
    "whole": {},
    "whole, with stop strings": {"stop": ["never generated"]},
    "whole, with token ids": {"return_token_ids": True},
}


@pytest.mark.parametrize("tokens", [[], [0], [999], [0, 999, 3]])
def test_every_token_of_a_vocabulary_is_valid(tokens: list[int]) -> None:
    check_tokens(tokens, 1000)


@pytest.mark.parametrize("tokens", [[1000], [-1], [1 << 62], [4, 5, 1000], [4, -5, 6]])
def test_a_token_outside_the_vocabulary_is_invalid(tokens: list[int]) -> None:
    with pytest.raises(InvalidOutput):
        check_tokens(tokens, 1000)


def test_details_that_engines_send_with_tokens_are_valid() -> None:
    check_logprobs([Logprob(-0.5, [(5, -0.5), (6, -inf)])], 1000)


@pytest.mark.parametrize(
    "bad",
    [
        Logprob(nan),
        Logprob(3.0),
        Logprob(-inf),
        Logprob(-0.5, [(1000, -1.0)]),
        Logprob(-0.5, [(-1, -1.0)]),
        Logprob(-0.5, [(5, nan)]),
        Logprob(-0.5, [(5, -1.0)] * 300),
    ],
)
def test_logprobs_that_no_engine_sends_are_invalid(bad: Logprob) -> None:
    with pytest.raises(InvalidOutput):
        check_logprobs([Logprob(-0.5), bad], 1000)


@pytest.mark.parametrize("cached", [-1, 3])
async def test_more_cached_tokens_than_the_prompt_has_are_invalid(cached: int) -> None:
    class Claiming(ScriptedWorker):
        def chunk_of(self, request: Generate, new: list[int], finish: str | None) -> Chunk:
            return Chunk(request.stream, new, finish, cached_tokens=cached)

    async with frontend() as kit:
        await first_goes_to(kit, Claiming("w1"), ScriptedWorker("w2"))
        text, body = await kit.complete(PROMPT, COUNT)
        assert text == TOKENS.decode(undisturbed(PROMPT, COUNT))
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] in (0, None)
        (moved,) = kit.said(RequestMigrated)
        assert (moved.source, moved.tokens) == ("w1", 0)


class Spoiling(ScriptedWorker):
    """Sends one token outside its model's vocabulary: as the first, a middle or the last one, as `spoils` says."""

    spoils, by = 0, 0

    def chunk_of(self, request: Generate, new: list[int], finish: str | None) -> Chunk:
        made = len(request.tokens) - request.prompt_tokens
        self.said = getattr(self, "said", made) + len(new)
        here = self.said == self.spoils + 1
        return super().chunk_of(request, [self.by] if here else new, finish)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [0, 4, COUNT - 1])
@pytest.mark.parametrize("token", [-1, TOKENS.size, 1 << 40])
async def test_an_answer_with_an_invalid_token_continues_elsewhere(way: str, place: int, token: int) -> None:
    asked: Json = {"prompt": PROMPT, "max_tokens": COUNT} | WAYS[way]
    spoiling = Spoiling("w1", step_s=0.003)  # each token separately: gathered tokens are checked together
    spoiling.spoils, spoiling.by = place, token
    async with frontend() as kit:
        await first_goes_to(kit, spoiling, ScriptedWorker("w2"))
        if asked.pop("stream", False):
            events = await kit.stream(model="m", **asked)
            assert events[-1] == {"done": True}, events[-1]
            text = text_of(events)
        else:
            _, answer, _ = await kit.post("/v1/completions", model="m", **asked)
            text = answer["choices"][0]["text"]
        assert text == TOKENS.decode(undisturbed(PROMPT, COUNT))
        (moved,) = kit.said(RequestMigrated)
        assert (moved.source, moved.tokens) == ("w1", place)


def test_a_workers_error_text_reaches_no_client() -> None:
    planted = "engine_error: key sk-123 at http://10.0.0.1 <script>"
    failure = classify(planted)
    assert "sk-123" in failure.detail, "facts and logs may contain it"
    assert "sk-123" not in str(failure.error) and "script" not in str(failure.error)
    assert str(failure.error) == failure.kind.message
    assert "as we say" in str(Failure("disconnected", "as we say").error)
