"""The demo's clients: each sends one request, reads its stream, and records the time of every token.

Each answer is compared token by token with the undisturbed answer to the same prompt.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from controller.trace.replay.endpoint import ReplayTarget

DEADLINE_S = 120.0


@dataclass(slots=True)
class Received:
    """One stream as its client received it. Times are in monotonic seconds."""

    request: str
    prompt: int
    wanted: int
    sent: float
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    done: bool = False

    def gap_after(self, instant: float) -> float:
        """Return the seconds from `instant` to the next token, or infinity if no later token arrived."""
        return next((t - instant for t in self.times if t > instant), float("inf"))


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """Numbers of tokens that were lost, received twice or altered, compared with the undisturbed answer."""

    lost: int = 0
    doubled: int = 0
    altered: int = 0


def compare(got: Sequence[str], expected: Sequence[str]) -> TokenDifference:
    """Return how a stream differs from the undisturbed answer.

    If tokens were replaced, all differences count as altered. After a wrong token the model generates a different text, in which
    lost or doubled tokens cannot be identified.
    """
    if list(got) == list(expected):
        return TokenDifference()
    lost = doubled = altered = 0
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, expected, got, autojunk=False).get_opcodes():
        if tag == "delete":
            lost += i2 - i1
        elif tag == "insert":
            doubled += j2 - j1
        elif tag == "replace":
            altered += max(i2 - i1, j2 - j1)
    return TokenDifference(altered=lost + doubled + altered) if altered else TokenDifference(lost, doubled)


class Users:
    """All clients of the demo, which send their requests to one endpoint.

    A token that is only part of a character adds no text, and by default it is not recorded. If `every_token` is true, it is
    recorded as a piece without text. For this purpose, the clients request logprobs, which arrive with each token.
    """

    def __init__(
        self, url: str, model: str, prompts: Sequence[Sequence[int]], *, every_token: bool = False
    ) -> None:
        self._url, self._model, self._prompts, self._every_token = url, model, prompts, every_token
        self.streams: list[Received] = []
        self.in_flight = 0
        self.tokens = 0

    def session(self) -> ReplayTarget:
        """Return the connections that all requests share."""
        return ReplayTarget(self._url)

    async def ask(self, session: ReplayTarget, prompt: int, tokens: int, name: str) -> Received:
        """Send one request with the prompt at index `prompt` of the pool, and read its stream to the end."""
        got = Received(name, prompt, tokens, time.monotonic())
        body = {
            "model": self._model,
            "prompt": list(self._prompts[prompt]),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        if self._every_token:
            body["logprobs"] = 1
        self.streams.append(got)
        self.in_flight += 1
        try:
            reply = await session.ask(
                "POST",
                "/v1/completions",
                json.dumps(body).encode(),
                take=lambda event, at: self._event(got, event),
                deadline_s=DEADLINE_S,
                headers={"X-Request-Id": name},
            )
        finally:
            self.in_flight -= 1
        if reply.status not in (0, 200):
            got.error = f"{reply.status} {reply.body.decode('utf-8', 'replace')[:120]}"
        elif reply.fault:
            got.error = got.error or f"{reply.fault}: {reply.detail}"
        if not got.done and not got.error:
            got.error = "the stream ended without [DONE]"
        return got

    def _event(self, got: Received, event: bytes) -> None:
        if event == b"[DONE]":
            got.done = True
            return
        chunk = json.loads(event)
        if "error" in chunk:
            got.error = str(chunk["error"].get("message", chunk["error"]))
            return
        choices = chunk.get("choices", ())
        text = "".join(choice.get("text", "") for choice in choices)
        if self._every_token and not any(choice.get("logprobs") for choice in choices):
            if text and got.pieces:  # this text completes the character of the piece before
                got.pieces[-1] += text
        elif text or self._every_token:
            got.pieces.append(text)
            got.times.append(time.monotonic())
            self.tokens += 1

    async def answers(self, session: ReplayTarget, tokens: int) -> list[list[str]]:
        """Return the undisturbed answer to every prompt of the pool, as pieces of text.

        Raise RuntimeError if a request failed."""
        requests = [self.ask(session, p, tokens, f"reference-{p}") for p in range(len(self._prompts))]
        got = await asyncio.gather(*requests)
        self.streams.clear()
        self.tokens = 0
        for one in got:
            if one.error:
                raise RuntimeError(f"the undisturbed answer to prompt {one.prompt} failed: {one.error}")
        return [one.pieces for one in got]
