"""One answer to a client's request, and the writer interface for its tokens."""

from collections.abc import Sequence
from typing import Any

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.request.state import GenerationRequest
from controller.router.endpoints import Endpoint
from events.errors import HoldfastError
from events.wire import Logprob, ProxiedPiece


class InvalidOutput(HoldfastError):
    """A worker's output cannot come from its model; the message names what is invalid."""


class ResponseWriter:
    """Accepts the tokens of one answer and discards them. Subclasses write the tokens to a client instead."""

    __slots__ = ()
    stopped = False  # a stop string has been reached
    reached = 0  # number of tokens that the client may already have received

    def write(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        """Accept tokens, and return how many of them were used: all, unless a stop string ends the answer.

        Raise InvalidOutput if a token is outside the vocabulary. No token is written in that case.
        """
        return len(tokens)

    def write_text(self, text: str, tokens: int) -> None:
        """Accept text that an engine returned without tokens. `tokens` is the number of tokens that the text counts as."""

    def pass_on(self, piece: ProxiedPiece) -> int:
        """Accept a piece of a proxied response, and return the number of tokens that it counts as.

        Raise InvalidOutput if the request was not proxied.
        """
        raise InvalidOutput("an HTTP response to a request that was not proxied")

    def end_at(self, token: int) -> None:
        """Accept the stop token that ended the answer, which has no text."""

    def finish(self, reason: str) -> None:
        """Write the remaining text and the end of the answer. `reason` is OpenAI's finish_reason."""

    def flush(self) -> None:
        """Send the output that was collected in this event-loop iteration."""

    def keep_alive(self) -> None:
        """Send an SSE comment, so that no proxy or client closes the connection as idle."""

    def rewind(self, count: int) -> None:
        """Drop all tokens after the first `count`. The client must not have received any of the dropped tokens."""


class Choice(msgspec.Struct, eq=False):
    """One answer to a client's request: the generation request, the writer and the outcome."""

    request: GenerationRequest
    writer: ResponseWriter
    migration_limit: int = 3  # number of attempts beyond the first
    forbidden: str = ""  # why the request may not move once its client has a token; empty if it may
    accepted: list[int] = []  # tokens of the answer that the frontend has accepted
    number: int = 0  # number of the live request
    cached_tokens: int | None = None  # number of cached prompt tokens, from the first worker that reports it
    endpoint: Endpoint | None = None  # the current worker, or the last one
    # why the answer's first worker was chosen; None if the client did not request an explanation
    explained: dict[str, Any] | None = None
    # false after a continuation on another worker that may have chosen other tokens than the first one
    exact: bool = True
    finish: str | None = None
    error: ApiError | None = None

    def __repr__(self) -> str:
        """Return a representation that may appear in logs, and therefore has no client content."""
        return f"<Choice of {self.request.id}>"
