"""Measures an OpenAI-compatible server or a Holdfast frontend, by streamed completions over HTTP.

If the server accepts token ids, prompts are token ids. Otherwise a prompt is a text of about the wanted number of tokens, and the
server reports how many tokens the text has. A server sends no event for a token that ends in the middle of a character, so an
answer can have more tokens than events. Events therefore only provide times. The number of tokens is read from the `usage` at the
end of the answer.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from controller.profiler.target import CannotMeasure, ProfiledStream, TargetRefused
from controller.trace.replay.endpoint import BadEndpoint, Now, ReplayTarget, now, words

ANSWER_S_MAX = 3600.0  # of a whole answer; callers limit the time between two events
CLOSE_S_MAX = 10.0
TOO_MUCH = (400, 413, 422, 429, 503, 529)
EVENTS_MAX = 4  # events per requested token; an answer with more events is ended
PROBE_WORDS = 200
TOKENS_MAX = 1 << 30  # of a prompt or an answer; a larger number is an error
WORDS = ("river", "seven", "copper", "morning", "engine", "quiet", "ladder", "paper", "north", "falcon")


class OpenAITarget:
    """Connects to the OpenAI-compatible server that is measured. Times are read from the clock `now`."""

    def __init__(self, url: str, key: str = "", model: str = "", now: Now = now) -> None:
        self.name = model
        self.context_tokens: int | None = None
        self._target = ReplayTarget(url, key, now)
        self._now = now
        self._url = self._target.url
        self._words_per_token = 0.0  # 0: the server accepts token ids
        self._extra: dict[str, object] = {"ignore_eos": True}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Select the model, and detect whether the server accepts token ids or only text.

        Raise CannotMeasure if the server does not have the requested model, or if its answers are not those of an
        OpenAI-compatible server.
        """
        try:
            about = await self._target.model(self.name)
        except BadEndpoint as error:
            raise CannotMeasure(str(error)) from None
        self.name, meta = str(about["id"]), about.get("meta")
        reported = about.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
        self.context_tokens = _count(reported)
        if await self._accepts([10, 11, 12]):
            return
        self._extra = {}
        if await self._accepts([10, 11, 12]):
            return
        self._words_per_token = 1.0
        probe = self.ask([0] * PROBE_WORDS, 2)
        await probe.whole()
        if not probe.prompt_tokens:
            raise CannotMeasure(
                f"{self._url} accepts text only, and does not report a prompt's tokens (usage)"
            )
        self._words_per_token = PROBE_WORDS / probe.prompt_tokens

    async def _accepts(self, prompt: list[int]) -> bool:
        stream = self.ask(prompt, 2)
        try:
            await stream.whole()
        except TargetRefused:
            return False
        return True

    def ask(self, prompt: list[int], tokens: int) -> ProfiledStream:
        """Request a completion of `tokens` tokens, and return its stream.

        A server that accepts only text gets a text of about as many tokens as `prompt` has.
        """
        stream = ProfiledStream(self._now())
        stream.prompt_tokens = 0 if self._words_per_token else len(prompt)
        body = {
            "model": self.name,
            "prompt": self._text(prompt) if self._words_per_token else prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        task = asyncio.ensure_future(self._read(stream, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def _text(self, prompt: Sequence[int]) -> str:
        """Return a text of about as many tokens as `prompt` has. Each token id of `prompt` selects one of ten words."""
        count = max(1, round(len(prompt) * self._words_per_token))
        return " ".join(WORDS[prompt[n % len(prompt)] % len(WORDS)] for n in range(count))

    async def _read(self, stream: ProfiledStream, body: dict[str, Any]) -> None:
        def take(event: bytes, at: float) -> None:
            try:
                if event != b"[DONE]":
                    _take(stream, json.loads(event), at)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                stream.end(CannotMeasure(f"{self._url} streams something other than a completion"))
            if len(stream.event_times) > EVENTS_MAX * body["max_tokens"]:
                stream.end(CannotMeasure(f"{self._url} sends more tokens than requested"))

        try:
            reply = await self._target.ask(
                "POST",
                "/v1/completions",
                json.dumps(body).encode(),
                take=take,
                deadline_s=ANSWER_S_MAX,
            )
            stream.asked_at = reply.began
            if reply.status not in (0, 200):
                kind = TargetRefused if reply.status in TOO_MUCH else CannotMeasure
                stream.end(kind(f"{self._url}/v1/completions answers {reply.status}: {words(reply.body)}"))
            elif reply.fault:
                stream.end(CannotMeasure(f"{self._url}: {reply.detail}"))
        finally:
            stream.end()

    async def close(self) -> None:
        """Close all connections."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S_MAX)
        await self._target.close()


def _take(stream: ProfiledStream, reported: dict[str, Any], at: float) -> None:
    """Record one event of an answer: a token's time, the token counts, or an error."""
    if "error" in reported:
        stream.end(
            CannotMeasure(f"the server ended an answer with an error: {words(json.dumps(reported).encode())}")
        )
        return
    if reported.get("choices"):
        choice = reported["choices"][0]
        if choice.get("text") or (choice.get("finish_reason") and not stream.event_times):
            stream.record(at)
    if usage := reported.get("usage"):
        stream.prompt_tokens = _count(usage.get("prompt_tokens")) or stream.prompt_tokens
        stream.tokens = _count(usage.get("completion_tokens")) or stream.tokens


def _count(reported: object) -> int | None:
    """Return a number of tokens that a server reported; None if it is missing or not plausible."""
    return reported if isinstance(reported, int) and 0 < reported <= TOKENS_MAX else None
