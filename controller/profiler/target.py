"""What is measured, as the sweep sees it: something that continues prompts, token by token, and when each came."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from events.errors import HoldfastError

SILENCE_S_MAX = 120.0  # between two tokens, and before the first


class CannotMeasure(HoldfastError):
    """The engine cannot be measured: it is not there, or does not answer."""


class TargetRefused(CannotMeasure):
    """The engine refuses this one request: it is too long, or too many run."""


@dataclass
class ProfiledStream:
    """One answer. A call of `said` for every event that brought something; `tokens` is what they were in all."""

    asked_at: float
    said_at: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: CannotMeasure | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # a flag: a token has come, or none will
    over: asyncio.Event = field(default_factory=asyncio.Event)  # a flag

    def said(self, at: float, tokens: int = 1) -> None:
        """Take in an event."""
        self.said_at.append(at)
        self.tokens += tokens
        self.begun.set()

    def end(self, error: CannotMeasure | None = None) -> None:
        """Take in that there is no more."""
        self.error = self.error or error
        self.begun.set()
        self.over.set()

    async def begins(self) -> None:
        """Wait for its first token, or its end. Raise CannotMeasure if neither comes."""
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                await self.begun.wait()
        except TimeoutError:
            raise CannotMeasure(f"no token came for {SILENCE_S_MAX:g} s") from None

    async def whole(self) -> None:
        """Wait for its end. Raise CannotMeasure if it has none, or a bad one."""
        while not self.over.is_set():
            heard = len(self.said_at)
            try:
                async with asyncio.timeout(SILENCE_S_MAX):
                    await self.over.wait()
            except TimeoutError:
                if len(self.said_at) == heard:
                    raise CannotMeasure(f"no token came for {SILENCE_S_MAX:g} s") from None
        if self.error is not None:
            raise self.error
        if not self.said_at:
            raise CannotMeasure("an answer ended without a token")

    @property
    def ttft_ms(self) -> float:
        """From the question to the first token."""
        return (self.said_at[0] - self.asked_at) * 1e3


class ProfiledEngine(Protocol):
    """An engine, or the way to one."""

    context_tokens: int | None  # where it says so
    name: str  # of its model

    async def open(self) -> None:
        """Reach it, and find out what it takes. Raise CannotMeasure."""
        ...

    def ask(self, prompt: list[int], tokens: int) -> ProfiledStream:
        """Let it continue a prompt of these tokens, or of as many, by so many tokens."""
        ...

    async def close(self) -> None:
        """Let go of it, and of what still runs."""
        ...
