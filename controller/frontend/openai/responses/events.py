"""The answers of OpenAI's Responses API: events of output items, and the whole response.

response.created, response.in_progress
    ──▶ per item: output_item.added, its deltas, their done events, output_item.done
    ──▶ response.completed, response.incomplete or response.failed
"""

from collections.abc import Sequence

from controller.frontend.errors import ApiError
from controller.frontend.openai.answer_events import (
    AnswerEvents,
    EventFormat,
    ShownLogprob,
    begin,
    encoded_event,
)
from controller.frontend.openai.choice import Choice
from controller.frontend.openai.formats import AnswerUsage, OutputModel
from controller.frontend.openai.request_head import Call
from controller.frontend.openai.sse import SseStream
from controller.frontend.openai.tools.output_delta import OutputDelta

Json = dict[str, object]
IN_PROGRESS = "in_progress"
PREFIX = "resp_"
PREFIXES = {"content": "msg_", "reasoning": "rs_", "tool_call": "fc_"}
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""By finish_reason: why a response is incomplete."""


class OpenItem:
    """The output item that is being written."""

    def __init__(self, delta: OutputDelta, id: str, index: int) -> None:
        """Start without text. `index` is the item's place in the output."""
        self.kind, self.call, self.index = delta.kind, delta.call, index
        self.item: Json = {"id": id, "type": "message", "status": "in_progress"}
        if delta.kind == "tool_call":
            self.item |= {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
        elif delta.kind == "reasoning":
            self.item |= {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
        else:
            self.item |= {"role": "assistant", "content": []}
        self._text: list[str] = []
        self._logprobs: list[object] = []

    @property
    def place(self) -> Json:
        """The fields that place an event in the output."""
        place: Json = {"item_id": self.item["id"], "output_index": self.index}
        return place if self.kind == "tool_call" else place | {"content_index": 0}

    @property
    def part(self) -> Json:
        """The item's only content part, as far as it is written."""
        text = "".join(self._text)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def add(self, delta: OutputDelta, logprobs: ShownLogprob) -> None:
        """Add a piece of text or of arguments."""
        self._text.append(delta.text)
        self._logprobs += logprobs

    def shown(self, status: str) -> Json:
        """Return the item with this status, and with the text so far."""
        text = {"arguments": "".join(self._text)} if self.kind == "tool_call" else {"content": [self.part]}
        return self.item | text | {"status": status}


class ResponseEvents(AnswerEvents):
    """The events and the output of one response."""

    def __init__(self, stream: SseStream | None, base: Json) -> None:
        """Start before the first event. `base` has the fields of the response that do not change."""
        super().__init__(stream)
        self._base = base
        self._tail = str(base["id"]).removeprefix(PREFIX)
        self._output: list[Json] = []  # the items that are complete
        self._open: OpenItem | None = None
        self._number = 0
        self._usage: Json | None = None
        self.status = IN_PROGRESS
        self._error: Json | None = None
        self._incomplete: Json | None = None

    def emit(self, kind: str, **body: object) -> None:
        super().emit(kind, sequence_number=self._number, **body)
        self._number += 1

    def begin(self, prompt: int, cached: int) -> None:
        self.emit("response.created", response=self.whole())
        self.emit("response.in_progress", response=self.whole())

    def add(self, delta: OutputDelta, logprobs: ShownLogprob) -> None:
        item = self._open
        if item is None or (item.kind, item.call) != (delta.kind, delta.call):
            self._close("completed")
            item = self._start(delta)
        if not delta.text:
            return
        item.add(delta, logprobs)
        if delta.kind == "tool_call":
            self.emit("response.function_call_arguments.delta", **item.place, delta=delta.text)
        elif delta.kind == "reasoning":
            self.emit("response.reasoning_text.delta", **item.place, delta=delta.text)
        else:
            self.emit("response.output_text.delta", **item.place, delta=delta.text, logprobs=logprobs)

    def _start(self, delta: OutputDelta) -> OpenItem:
        index = len(self._output)
        item = self._open = OpenItem(delta, f"{PREFIXES[delta.kind]}{self._tail}_{index}", index)
        self.emit("response.output_item.added", output_index=index, item=item.item)
        if delta.kind != "tool_call":
            self.emit("response.content_part.added", **item.place, part=item.part)
        return item

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        shown, part, place = item.shown(status), item.part, item.place
        if item.kind == "tool_call":
            arguments = shown["arguments"]
            self.emit(
                "response.function_call_arguments.done", **place, name=item.item["name"], arguments=arguments
            )
        else:
            if item.kind == "reasoning":
                self.emit("response.reasoning_text.done", **place, text=part["text"])
            else:
                self.emit("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            self.emit("response.content_part.done", **place, part=part)
        self.emit("response.output_item.done", output_index=item.index, item=shown)
        self._output.append(shown)

    def finish(self, reason: str, stop: int | str | None) -> None:
        why = INCOMPLETE.get(reason)
        if why is not None:
            self._incomplete = {"reason": why}
        self._close("completed" if why is None else "incomplete")

    def end(self, usage: AnswerUsage) -> None:
        self.status = "completed" if self._incomplete is None else "incomplete"
        self._usage = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.answer,
        }
        self.emit(f"response.{self.status}", response=self.whole())

    def fail(self, error: ApiError) -> None:
        """End the response with an error, or as cancelled."""
        self.status = "cancelled" if error.code == "cancelled" else "failed"
        self._error = {"code": error.code, "message": str(error)}
        self.emit("response.failed", response=self.whole())

    def whole(self) -> Json:
        output = self._output if self._open is None else [*self._output, self._open.shown("in_progress")]
        return self._base | {
            "status": self.status,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "output": list(output),
            "usage": self._usage,
        }


class ResponsesFormat(EventFormat):
    """The format of /v1/responses."""

    events: ResponseEvents

    def __init__(self, call: Call, model: OutputModel, stream: SseStream | None) -> None:
        super().__init__(call, model, stream)
        parsed = call.parsed
        assert parsed.response is not None
        base: Json = {
            "id": parsed.response.id or PREFIX + call.id,
            "object": "response",
            "created_at": self.created,
            "model": parsed.called or parsed.model,
        }
        self.events = ResponseEvents(stream, base | parsed.response.shown)

    def failed(self, error: ApiError, answers: Sequence[Choice]) -> bytes:
        begin(self.events, answers[0])
        self.events.fail(error)
        return b""  # the events are written already

    def ended(self, answers: Sequence[Choice], error: ApiError | None) -> Json:
        """Return the whole response after its end. `error` has ended it, unless it is None."""
        if error is None:
            return self.body(answers)
        if self.events.status == IN_PROGRESS:
            self.events.fail(error)
        return self.events.whole()

    @staticmethod
    def failure(error: ApiError, request: str) -> bytes:
        shown: Json = {"code": error.code, "message": str(error), "param": error.param, "sequence_number": 0}
        return encoded_event("error", shown)
