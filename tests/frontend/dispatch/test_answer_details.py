"""The details of an answer that come from its worker, besides the tokens."""

from frontend_kit import frontend
from scripted_worker import ScriptedWorker

from events.wire import Chunk, Generate

PROMPT = [300, 301, 302]


class LateCachedCount(ScriptedWorker):
    """Reports only with its last token how much of the prompt was cached."""

    def chunk_of(self, request: Generate, new: list[int], finish: str | None) -> Chunk:
        chunk = super().chunk_of(request, new, finish)
        if finish is not None:
            chunk.cached_tokens = 2
        return chunk


async def test_cached_tokens_may_be_reported_with_the_last_token() -> None:
    async with frontend(LateCachedCount(step_s=0.01)) as kit:
        _, body = await kit.complete(PROMPT, 3)
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
