"""The API, as plain HTTP sees it."""

from frontend_kit import TOKENS, frontend, text_of
from scripted_worker import ScriptedWorker, undisturbed

PROMPT = [300, 301, 302]


async def test_a_completion_is_what_the_worker_said() -> None:
    async with frontend(ScriptedWorker()) as kit:
        text, body = await kit.complete(PROMPT, 8)
        assert text == TOKENS.decode(undisturbed(PROMPT, 8))
        assert body["usage"]["prompt_tokens"] == 3
        assert body["usage"]["completion_tokens"] == 8
        assert body["choices"][0]["finish_reason"] == "length"


async def test_a_stream_says_the_same_token_by_token() -> None:
    async with frontend(ScriptedWorker()) as kit:
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=8)
        assert text_of(events) == TOKENS.decode(undisturbed(PROMPT, 8))
        assert events[-1] == {"done": True}
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * 8 + ["length"]
