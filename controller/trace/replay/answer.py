"""The outcome of one replayed request: the number and times of its answer's tokens, and any failure."""

from collections.abc import Callable
from typing import Annotated

import msgspec

from controller.trace.replay.endpoint import Reply, printable, words

_Number = Annotated[int, msgspec.Meta(ge=0)]


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the name of the same field in newer versions of vLLM


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Number | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Number | None = None
    completion_tokens: _Number | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode
Count = Callable[[float], None]
"""A callback that gets a duration in seconds."""


def _ignore(seconds: float) -> None:
    """Do nothing. This is the default of the callbacks of `ReplayedAnswer`."""


class ReplayedAnswer:
    """Measures one answer as it arrives. All times are from the clock of the client that receives the answer.

    The server sends no event for a token that ends in the middle of a character, so there can be fewer events than tokens. The
    number of tokens is therefore read from the `usage` at the end of the answer; events only provide times. The callback
    `first_token` gets the seconds from the request to the first token. The callback `gap` gets the seconds between two
    consecutive events.
    """

    __slots__ = (
        "_first_token", "_gap", "asked_at", "cached", "done", "events", "fault", "first", "gap_max", "last", "prompt_tokens",
        "reported_tokens",
    )  # fmt: skip

    def __init__(self, asked_at: float = 0.0, *, first_token: Count = _ignore, gap: Count = _ignore) -> None:
        self.asked_at = asked_at
        self._first_token, self._gap = first_token, gap
        self.first = self.last = self.gap_max = 0.0
        self.events = self.prompt_tokens = self.reported_tokens = 0
        self.cached: int | None = None  # cached tokens of the prompt; None: the server does not report them
        self.done = False  # whether the final event has arrived
        self.fault = ("", "")  # kind of the error and the server's text; both are empty without an error

    @property
    def tokens(self) -> int:
        """Number of tokens in the answer, from the server's `usage`. Until `usage` has arrived, the number of events."""
        return self.reported_tokens or self.events

    def take(self, event: bytes, at: float) -> None:
        """Process an event that arrived at time `at`."""
        if event == b"[DONE]":
            self.done = True
            return
        try:
            said = _decode(event)
        except msgspec.MsgspecError:
            self.fault = ("malformed event", words(event))
            return
        if said.usage is not None:
            self._count(said.usage)
        for choice in said.choices or ():
            delta = choice.delta
            text = choice.text or (
                delta is not None and (delta.content or delta.reasoning_content or delta.reasoning)
            )
            if text or (choice.finish_reason and not self.events):  # an answer's only token may have no text
                self._token(at)
        if said.error and bytes(said.error) != b"null":
            self.fault = (f"error event{_code(event)}", words(event))

    def _token(self, at: float) -> None:
        if self.events:
            gap = at - self.last
            if gap > self.gap_max:
                self.gap_max = gap
            self._gap(gap)
        else:
            self.first = at
            self._first_token(at - self.asked_at)
        self.events += 1
        self.last = at

    def _count(self, usage: _Usage) -> None:
        self.prompt_tokens, self.reported_tokens = usage.prompt_tokens or 0, usage.completion_tokens or 0
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            self.cached = details.cached_tokens


def failure(reply: Reply, answer: ReplayedAnswer) -> tuple[str, str]:
    """Return the kind and a description of a request's failure. Both are empty if the answer is complete."""
    if reply.status not in (0, 200):
        return f"HTTP {reply.status}{_code(reply.body)}", words(reply.body)
    if answer.fault[0]:
        return answer.fault
    # after a complete answer, it does not matter how the server closes the connection
    if reply.fault and not (answer.done and reply.fault == "broke off"):
        return reply.fault, reply.detail
    if not answer.done:
        return "incomplete", "the answer ended without [DONE]" if answer.events else words(reply.body)
    return ("", "") if answer.events else ("empty", "the answer has no token")


def _code(body: bytes) -> str:
    """Return a space and the error code in the body of an error response; "" if the body has no code."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return ""
    return f" {printable(str(code))[:60]}" if code else ""
