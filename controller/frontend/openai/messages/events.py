"""The answers of Anthropic's Messages API: events of content blocks, and the whole message.

message_start ──▶ per block: content_block_start, content_block_delta …, content_block_stop ──▶ message_delta, message_stop
"""

from hashlib import blake2b

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.openai.answer_events import (
    AnswerEvents,
    EventFormat,
    ShownLogprob,
    encoded_event,
)
from controller.frontend.openai.formats import AnswerUsage, OutputModel
from controller.frontend.openai.messages.errors import error_body
from controller.frontend.openai.request_head import Call
from controller.frontend.openai.sse import SseStream
from controller.frontend.openai.tools.output_delta import OutputDelta

Json = dict[str, object]
KINDS = {"content": "text", "reasoning": "thinking", "tool_call": "tool_use"}
STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
SIGNATURE_BYTES = 16


class MessageEvents(AnswerEvents):
    """The events and the content of one message."""

    def __init__(self, stream: SseStream | None, id: str, model: str) -> None:
        """Start before the first event of the message with this id."""
        super().__init__(stream)
        self._message: Json = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._content: list[Json] = []
        self._text: list[str] = []  # of the last block
        self._open: tuple[str, int] | None = None  # kind and call of the last block while it is open
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}
        self._usage: Json = {}

    def begin(self, prompt: int, cached: int) -> None:
        self._usage = _usage(AnswerUsage(prompt, 0, cached))
        self.emit("message_start", message=self._message | self._stop | {"content": [], "usage": self._usage})

    def add(self, delta: OutputDelta, logprobs: ShownLogprob) -> None:
        if self._open != (delta.kind, delta.call):
            self._close()
            self._start(delta)
        if delta.text:
            self._text.append(delta.text)
            self._delta(_changes(delta))

    def _start(self, delta: OutputDelta) -> None:
        self._open = delta.kind, delta.call
        block: Json = {"type": KINDS[delta.kind]}
        if delta.kind == "tool_call":
            block |= {"id": delta.id, "name": delta.name, "input": {}}
        elif delta.kind == "reasoning":
            block |= {"thinking": "", "signature": ""}
        else:
            block["text"] = ""
        self.emit("content_block_start", index=len(self._content), content_block=block)
        self._content.append(block)

    def _close(self) -> None:
        if self._open is None:
            return
        kind, text, block = self._open[0], "".join(self._text), self._content[-1]
        if kind == "tool_call":
            block["input"] = _arguments(text)
        elif kind == "content":
            block["text"] = text
        else:
            signature = blake2b(text.encode(), digest_size=SIGNATURE_BYTES).hexdigest()
            block |= {"thinking": text, "signature": signature}
            self._delta({"type": "signature_delta", "signature": signature})
        self.emit("content_block_stop", index=len(self._content) - 1)
        self._open, self._text = None, []

    def _delta(self, delta: Json) -> None:
        self.emit("content_block_delta", index=len(self._content) - 1, delta=delta)

    def finish(self, reason: str, stop: int | str | None) -> None:
        self._close()
        text = isinstance(stop, str) and reason == "stop"
        self._stop = {
            "stop_reason": "stop_sequence" if text else STOP_REASONS.get(reason, "end_turn"),
            "stop_sequence": stop if text else None,
        }

    def end(self, usage: AnswerUsage) -> None:
        self._usage = _usage(usage)
        self.emit("message_delta", delta=self._stop, usage=self._usage)
        self.emit("message_stop")

    def whole(self) -> Json:
        return self._message | {"content": self._content} | self._stop | {"usage": self._usage}


def _changes(delta: OutputDelta) -> Json:
    if delta.kind == "content":
        return {"type": "text_delta", "text": delta.text}
    if delta.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": delta.text}
    return {"type": "input_json_delta", "partial_json": delta.text}


def _usage(usage: AnswerUsage) -> Json:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.answer,
    }


def _arguments(text: str) -> Json:
    """Return a call's arguments. A call that was cut off has none, and `stop_reason` is not `tool_use`."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError:
        return {}


class MessagesFormat(EventFormat):
    """The format of /v1/messages."""

    def __init__(self, call: Call, model: OutputModel, stream: SseStream | None) -> None:
        super().__init__(call, model, stream)
        parsed = call.parsed
        self.events = MessageEvents(stream, f"msg_{call.id}", parsed.called or parsed.model)

    @staticmethod
    def failure(error: ApiError, request: str) -> bytes:
        return encoded_event("error", error_body(error, request))
