"""The interface of an engine that is measured, and the recorded token times of one answer."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from events.errors import HoldfastError

SILENCE_S_MAX = 120.0  # longest wait for the first token, and between two tokens


class CannotMeasure(HoldfastError):
    """The engine cannot be measured: it cannot be reached, or does not answer."""


class TargetRefused(CannotMeasure):
    """The engine refuses this one request: the request is too long, or too many requests run."""


@dataclass
class ProfiledStream:
    """One answer as it arrives: the times of its events, its number of tokens, and any error."""

    asked_at: float
    event_times: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0  # 0: not known yet
    error: CannotMeasure | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # set at the first token or the end
    over: asyncio.Event = field(default_factory=asyncio.Event)  # set at the end of the answer

    def record(self, at: float, tokens: int = 1) -> None:
        """Record that an event with this many tokens arrived at time `at`."""
        self.event_times.append(at)
        self.tokens += tokens
        self.begun.set()

    def end(self, error: CannotMeasure | None = None) -> None:
        """Record that the answer has ended, with an error if it failed. If there are several errors, the first is kept."""
        self.error = self.error or error
        self.begun.set()
        self.over.set()

    async def begins(self) -> None:
        """Wait for the first token or the end of the answer. Raise CannotMeasure if neither comes within SILENCE_S_MAX."""
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                await self.begun.wait()
        except TimeoutError:
            raise CannotMeasure(f"no token came for {SILENCE_S_MAX:g} s") from None

    async def whole(self) -> None:
        """Wait for the end of the answer.

        Raise CannotMeasure if no event arrives for SILENCE_S_MAX, or if the answer ended with an error or without a token.
        """
        while not self.over.is_set():
            heard = len(self.event_times)
            try:
                async with asyncio.timeout(SILENCE_S_MAX):
                    await self.over.wait()
            except TimeoutError:
                if len(self.event_times) == heard:
                    raise CannotMeasure(f"no token came for {SILENCE_S_MAX:g} s") from None
        if self.error is not None:
            raise self.error
        if not self.event_times:
            raise CannotMeasure("an answer ended without a token")

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from the request to the first token."""
        return (self.event_times[0] - self.asked_at) * 1e3


class ProfiledEngine(Protocol):
    """A connection to an engine that is measured."""

    context_tokens: int | None  # the model's context length; None: unknown
    name: str  # of the engine's model

    async def open(self) -> None:
        """Connect, and detect which forms of requests the engine accepts. Raise CannotMeasure if the engine does not answer."""

    def ask(self, prompt: list[int], tokens: int) -> ProfiledStream:
        """Request a completion of `tokens` tokens, and return its stream.

        An implementation may replace `prompt` by another prompt of about the same length."""

    async def close(self) -> None:
        """Close the connection, and cancel requests in flight."""
