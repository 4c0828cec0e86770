"""The response format of each API: the writers of its answers, the end of a stream, the whole body.

    tokens of a worker ──▶ writers of an `AnswerFormat` ──▶ the events of a stream, or the body of one response

All formats show the same answers. `ChatFormat` is that of chats and completions.
"""

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from controller.frontend.errors import ApiError
from controller.frontend.openai import writers
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.openai.output_formats import OutputFormats, is_parsed, parser_of
from controller.frontend.openai.parsed_writers import ParsedBufferedWriter, ParsedStreamingWriter
from controller.frontend.openai.request_head import Call
from controller.frontend.openai.sse import DONE, SseStream
from controller.frontend.openai.text.tokenizer import Tokens
from controller.frontend.openai.tools.output_parser import OutputParser

NOT_REQUESTED: dict[bool, tuple[dict[str, object], dict[str, object]]] = {
    True: (dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text")), {"token_ids": None}),
    False: ({}, dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "token_ids"))),
}
"""By whether it is a chat: the details beside and in each choice, which are null unless the client requests them, as in vLLM."""


class AnswerUsage(NamedTuple):
    """The numbers of tokens of a request: in its prompts, in its answers, and cached prompt tokens."""

    prompt: int
    answer: int
    cached: int


def answer_usage(answers: Sequence[Choice], n: int) -> AnswerUsage:
    """Return the prompt tokens, and the accepted tokens of all answers, over all attempts.

    `n` is the number of answers to each prompt. Choices of one prompt share its tokens, so each prompt is counted once.
    """
    # plain loops, because generators take four times as long
    made = read = cached = 0
    for answer in answers:
        made += len(answer.accepted)
    for answer in answers[::n]:
        read += len(answer.request.prompt)
        cached += answer.cached_tokens or 0
    return AnswerUsage(read, made, cached)


class OutputModel(NamedTuple):
    """What the responses of one model have in common."""

    tokens: Tokens
    formats: OutputFormats  # of reasoning and tool calls
    fingerprint: str  # the value of `system_fingerprint`


class WholeResponse(NamedTuple):
    """A response that is not streamed."""

    body: bytes
    status: int = 200
    media: str = "application/json"


class AnswerFormat:
    """The format of the response to one request. Each API has a subclass."""

    def __init__(self, call: Call, model: OutputModel, stream: SseStream | None) -> None:
        """Start without answers. `stream` is None for a response that is not streamed."""
        self.parsed = parsed = call.parsed
        self.stream = stream
        self.formats = formats = model.formats
        self.created = int(time.time())  # noqa: TID251 (shown to the client, compared with nothing)
        self.is_parsed = is_parsed(parsed, formats)
        special = parsed.special or self.is_parsed
        self.shared = writers.ResponseFormat(
            parsed, model.tokens, call.id, self.created, special=special, fingerprint=model.fingerprint
        )

    def writer(self, index: int, prompt: list[int], text: str, accepted: list[int]) -> ResponseWriter:
        """Return the writer of the answer with this index among the request's answers.

        `text` is the prompt as text, and `accepted` is the growing list of the answer's tokens.
        """
        raise NotImplementedError

    def last(self, answers: Sequence[Choice]) -> bytes:
        """Return the end of a stream after all its answers have ended well."""
        raise NotImplementedError

    def failed(self, error: ApiError, answers: Sequence[Choice]) -> bytes:
        """Return the end of a started stream that fails with this error."""
        return self.failure(error, self.shared.request)

    @staticmethod
    def failure(error: ApiError, request: str) -> bytes:
        """Return the end of a stream that fails before the request, which has this id, has answers."""
        return writers.event(error.body())

    def whole(self, answers: Sequence[Choice]) -> WholeResponse:
        """Return the response to a request that is not streamed."""
        return WholeResponse(json.dumps(self.body(answers), ensure_ascii=False).encode())

    def body(self, answers: Sequence[Choice]) -> dict[str, object]:
        """Return the JSON body of a request that is not streamed."""
        raise NotImplementedError

    def parser(self, index: int, text: str) -> OutputParser:
        """Return the parser of the answer with this index. `text` is the prompt as text."""
        return parser_of(self.parsed, self.formats, text, f"{self.shared.request}-{index}")


class ChatFormat(AnswerFormat):
    """The format of chats and of completions."""

    def writer(self, index: int, prompt: list[int], text: str, accepted: list[int]) -> ResponseWriter:
        format, parsed, context = self.shared, self.parsed, writers.PLAIN
        if parsed.detailed:
            echoed = (text or format.tokens.decode(prompt)) if parsed.echo else parsed.echo_text
            requested = parsed.logprobs_of_prompt is not None
            shown = (text or format.tokens.decode(prompt, special=True)) if parsed.prompt_text else ""
            context = writers.AnswerContext(prompt, echoed, shown, accepted, requested)
        if self.is_parsed:
            if self.stream is None:
                return ParsedBufferedWriter(format, context, partial(self.parser, index, text))
            return ParsedStreamingWriter(format, self.stream, index, context, self.parser(index, text))
        if self.stream is None:
            return writers.BufferedWriter(format, context)
        return writers.StreamingWriter(format, self.stream, index, context)

    def last(self, answers: Sequence[Choice]) -> bytes:
        if self.parsed.include_usage:
            return self.shared.total(self._usage(answers)) + DONE
        return DONE

    def body(self, answers: Sequence[Choice]) -> dict[str, object]:
        parts = enumerate(answer.writer for answer in answers)
        choices = [part.choice(index) for index, part in parts if isinstance(part, writers.BufferedWriter)]
        name = "chat.completion" if self.parsed.chat else "text_completion"
        more = {"usage": self._usage(answers), "system_fingerprint": self.shared.fingerprint}
        whole = self.shared.response(name, choices) | more
        if self.parsed.chat and self.parsed.token_ids:
            whole["prompt_token_ids"] = answers[0].request.prompt
        if self.parsed.chat:  # a chat has one prompt, so these are beside its choices
            for name in ("prompt_logprobs", "prompt_text"):
                values = [choice.pop(name) for choice in choices if name in choice]
                whole |= {name: values[0]} if values else {}
        beside, within = NOT_REQUESTED[self.parsed.chat]
        for choice in choices:
            choice |= within | choice
        return beside | whole

    def _usage(self, answers: Sequence[Choice]) -> dict[str, object]:
        counts = answer_usage(answers, self.parsed.n)
        total = writers.usage(counts.prompt, 0 if self.parsed.silent else counts.answer)
        return total | {"prompt_tokens_details": {"cached_tokens": counts.cached}}
