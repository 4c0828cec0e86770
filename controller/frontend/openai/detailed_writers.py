"""How an answer reaches a client who wants more of it than its text: the prompt before it, token ids, the usage so far.

Few do, and each event of theirs is encoded by itself; everybody else's are written by `writers`, which knows nothing of this.
What an event has besides is vLLM's: `token_ids` in a choice; `prompt_token_ids` with the first event of one, in the choice or,
of a chat, beside it; `usage` beside it. An echo comes in one event with the first token.

With an echo the logprobs of the prompt are wanted too. They come before those of the first tokens that an attempt gives, one
for each token of the prompt; the first token's says nothing, because nothing stands before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from controller.frontend.openai.request_parser import AnswerDetails
from controller.frontend.openai.response_format import ResponseFormat, show_logprobs
from controller.frontend.openai.sse import SseStream
from controller.frontend.openai.text.incremental_detokenizer import IncrementalDetokenizer
from controller.frontend.openai.text.vocabulary import check_tokens
from controller.frontend.openai.writers import BufferedWriter
from events.wire import Logprob


class AnswerContext(msgspec.Struct):
    """What is said of one answer besides its text."""

    wanted: AnswerDetails
    prompt: list[int]  # its tokens
    prompt_text: str  # what is echoed
    silent: bool  # nothing but the prompt is wanted: what is generated is not shown
    accepted: list[
        int
    ] = []  # its own tokens, all of them: the generation's list, which grows with every step

    def usage(self, made: int) -> dict[str, int]:
        """Return the usage when so many tokens have been shown."""
        read = len(self.prompt)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


class PromptLogprobs:
    """The logprobs of one answer's prompt, as they come with its first tokens."""

    __slots__ = ("_due", "_wanted", "found")

    def __init__(self, wanted: bool, tokens: int) -> None:
        """Expect one for each of so many tokens, if they are `wanted`."""
        self._wanted = tokens if wanted else 0
        self._due = wanted
        self.found: list[Logprob] = []

    def taken_from(
        self, logprobs: Sequence[Logprob] | None, tokens: Sequence[int]
    ) -> Sequence[Logprob] | None:
        """Keep those of the prompt, if they are due, and return those of these tokens of the answer."""
        if not self._due or logprobs is None:
            return logprobs
        self._due = False
        if len(logprobs) < self._wanted + len(tokens):  # a worker of the release before knows nothing of them
            return logprobs
        self.found = list(logprobs[: self._wanted])
        return logprobs[self._wanted :]

    def rewind(self, count: int) -> None:
        """Expect them anew where none of the answer's tokens is kept."""
        self._due = self._due or (bool(self._wanted) and not count)


def _echoed_logprobs(
    format: ResponseFormat,
    context: AnswerContext,
    prompt: Sequence[Logprob],
    tokens: Sequence[int],
    own: Sequence[Logprob],
) -> dict[str, Any]:
    """Return the logprobs of an echo and of the tokens behind it. Of the prompt's first token there is none; nor, where the
    worker is of a release that gives none, of the others."""
    read = len(context.prompt)
    silent = 1 if len(prompt) == read else read
    blank = [Logprob(0.0)] * silent
    shown = show_logprobs(format, [*context.prompt, *tokens], [*blank, *prompt[silent:], *own], 0)
    for name in ("token_logprobs", "top_logprobs"):
        shown[name][:silent] = [None] * silent
    return shown


class DetailedStreamingWriter:
    """Writes each token as it comes, as an event of its own, with all that is wanted of it. Implements `ResponseWriter`."""

    __slots__ = (
        "_before_it", "_begun", "_context", "_detokenizer", "_format", "_index", "_offset", "_stream", "_written", "flush",
        "stopped",
    )  # fmt: skip

    def __init__(self, format: ResponseFormat, stream: SseStream, index: int, context: AnswerContext) -> None:
        """Write the answer with this index among the request's answers."""
        self._format = format
        self._stream = stream
        self._index = index
        self._context = context
        self.flush: Callable[[], None] = stream.flush
        self.stopped = False
        self._begun = False  # something was written
        self._written = 0  # tokens
        self._offset = 0  # characters of the tokens whose logprobs were shown
        self._detokenizer: IncrementalDetokenizer = format.detokenizer()
        echoed = context.wanted.echo and format.logprobs is not None
        self._before_it = PromptLogprobs(echoed, len(context.prompt))

    @property
    def reached(self) -> int:
        return self._written

    def write(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        check_tokens(tokens, self._format.tokens.size)
        own = self._before_it.taken_from(logprobs, tokens)
        if self._context.silent:
            return len(tokens)
        self._open()
        for place, token in enumerate(tokens):
            text = self._detokenizer.feed(token)
            self._written += 1
            lp = own[place : place + 1] if own is not None else ()
            self._say(text, [token], lp)
            if self._detokenizer.stopped:
                self.stopped = True
                return place + 1
        return len(tokens)

    def write_text(self, text: str, tokens: int) -> None:
        self._open()
        self._written += tokens
        self._say(self._detokenizer.feed_text(text, tokens), [], ())
        self.stopped = self._detokenizer.stopped

    def finish(self, reason: str) -> None:
        self._open()
        rest, context = self._detokenizer.end(), self._context
        hidden = [] if context.silent else context.accepted[self._written :]  # a stop token, which is no text
        if context.silent:
            reason = "length"
        if rest or not self._begun:
            self._say(rest, [], ())
        self._written += len(hidden)
        self._event({} if self._format.chat else {"text": ""}, None, reason, hidden)

    def keep_alive(self) -> None:
        self._stream.keep_alive()

    def rewind(self, count: int) -> None:
        assert count >= self._written, "what a client has seen cannot be taken back"
        self._before_it.rewind(count)

    def _open(self) -> None:
        """Begin a chat answer: the first event names the role."""
        if self._format.chat and not self._begun:
            self._event({"role": "assistant", "content": ""}, None, None, [])

    def _say(self, text: str, tokens: list[int], logprobs: Sequence[Logprob]) -> None:
        """Write what a token, or none, has brought, with all that must stand before it."""
        format, context = self._format, self._context
        shown: dict[str, Any] | None = None
        if not self._begun and context.wanted.echo:
            text = context.prompt_text + text
            if format.logprobs is not None:
                found = self._before_it.found
                shown = _echoed_logprobs(format, context, found, tokens, logprobs)
                self._offset = sum(map(len, map(format.tokens.text_of, context.prompt)))
        elif format.logprobs is not None and logprobs:
            shown = show_logprobs(format, tokens, logprobs, self._offset)
        if shown is not None:
            self._offset += sum(map(len, map(format.tokens.text_of, tokens)))
        if text or shown is not None or (tokens and context.wanted.token_ids):
            self._event({"content": text} if format.chat else {"text": text}, shown, None, tokens)

    def _event(self, said: dict[str, Any], logprobs: Any, finish: str | None, tokens: list[int]) -> None:
        format, context, wanted = self._format, self._context, self._context.wanted
        choice: dict[str, Any] = {"index": self._index}
        choice |= {"delta": said} if format.chat else said
        choice |= {"logprobs": logprobs, "finish_reason": finish}
        beside: dict[str, Any] = {}
        if wanted.token_ids:
            choice["token_ids"] = tokens
            if not self._begun:
                (beside if format.chat else choice)["prompt_token_ids"] = context.prompt
        if wanted.usage:
            beside["usage"] = context.usage(self._written)
        self._begun = True
        after = format.after if "usage" not in beside else b"]}\n\n"
        if beside:
            after = b"]," + msgspec.json.encode(beside)[1:-1] + after[1:]
        self._stream.parts += (format.before, msgspec.json.encode(choice), after)


class DetailedBufferedWriter(BufferedWriter):
    """Gathers the answer, and gives it whole, with all that is wanted of it."""

    def __init__(self, format: ResponseFormat, context: AnswerContext) -> None:
        super().__init__(format)
        self._context = context
        echoed = context.wanted.echo and format.logprobs is not None
        self._before_it = PromptLogprobs(echoed, len(context.prompt))

    def write(self, tokens: Sequence[int], logprobs: Sequence[Logprob] | None) -> int:
        own = self._before_it.taken_from(logprobs, tokens)
        return len(tokens) if self._context.silent else super().write(tokens, own)

    def finish(self, reason: str) -> None:
        super().finish("length" if self._context.silent else reason)

    def rewind(self, count: int) -> None:
        self._before_it.rewind(count)
        super().rewind(count)

    def choice(self, index: int) -> dict[str, Any]:
        out, context, format = super().choice(index), self._context, self._format
        if context.wanted.echo:
            out["text"] = context.prompt_text + out["text"]
            if format.logprobs is not None:
                found = self._before_it.found
                out["logprobs"] = _echoed_logprobs(format, context, found, self._tokens, self._logprobs)
        if context.wanted.token_ids:
            out["token_ids"] = [] if context.silent else list(context.accepted)
            if not format.chat:
                out["prompt_token_ids"] = context.prompt
        return out
