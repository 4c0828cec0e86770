"""Models of the bodies of OpenAI's Responses API, and the tables of refused and ignored fields.

As in `request_models`, a field that is neither in a model nor in a table is accepted, and the header `Warning` names it.
"""

from typing import Annotated, Literal

from pydantic import Field

from controller.frontend.openai.request_models import (
    FUNCTION_NAME_MAX,
    MESSAGES_MAX,
    PARTS_MAX,
    TOOLS_MAX,
    TOP_LOGPROBS_MAX,
    Harmless,
    Json,
    Lenient,
    option,
)

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ItemPart(Lenient):
    """One part of an item's content. Only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


ItemParts = Annotated[list[ItemPart], Field(max_length=PARTS_MAX)]


class InputItem(Lenient):
    """One item of the input: message, function_call, function_call_output, reasoning or item_reference."""

    type: str = option("left out: message", "message")
    role: Literal["user", "assistant", "system", "developer"] | None = option("of a message")
    content: str | ItemParts | None = option("of a message or of reasoning")
    id: str | None = option("of an item_reference: an item of a stored response")
    call_id: str | None = option("of a function_call and of its output")
    name: str | None = option("of a function_call", max_length=FUNCTION_NAME_MAX)
    arguments: str | None = option("of a function_call: JSON")
    output: str | ItemParts | None = option("of a function_call_output")


class FunctionTool(Lenient):
    """A function that the model may call. Hosted tools are refused."""

    type: str
    name: str | None = option("the function's name; required", max_length=FUNCTION_NAME_MAX)
    description: str | None = option("what the function does, for the model")
    parameters: Json | None = option("JSON schema of the function's arguments")
    strict: bool | None = None


class ReasoningConfig(Lenient):
    """How much the model reasons."""

    effort: str | None = option(
        "for models with a chat template that reads it; none: no reasoning", max_length=32
    )


class TextConfig(Lenient):
    """The form of the answer's text."""

    format: Json | None = option("type text, json_object or json_schema")
    verbosity: Literal["medium"] | None = option("only medium")


class ResponsesBody(Lenient):
    """POST /v1/responses."""

    model: str = option("a name listed by /v1/models; optional if only one model is served", "")
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MESSAGES_MAX)] = Field(
        description=f"a text, or at most {MESSAGES_MAX:,} items: message, function_call, function_call_output, reasoning, "
        "item_reference"
    )
    instructions: str | None = option("the system prompt; those of a previous response are not carried over")
    previous_response_id: str | None = option("a stored response that this one continues", max_length=128)
    store: bool | None = option("false: do not keep the response for later requests; default true")
    stream: bool | None = option("send events instead of the whole answer")
    max_output_tokens: int | None = option("maximum tokens of the answer", ge=1)
    temperature: float | None = option("sampling temperature; default 1", ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = option("sample from the most likely tokens with this total probability", gt=0, le=1)
    tools: list[FunctionTool] | None = option("functions that the model may call", max_length=TOOLS_MAX)
    tool_choice: str | Json | None = option(
        "auto (default with tools), none, required, or the function to call"
    )
    parallel_tool_calls: bool | None = option("false: at most one call in an answer")
    text: TextConfig | None = option("format of the answer: text, json_object or json_schema")
    reasoning: ReasoningConfig | None = option("effort; summaries are not written")
    include: list[str] | None = option(
        "message.output_text.logprobs: return the logprobs of the text; other values have no effect"
    )
    top_logprobs: int | None = option(
        "also return the logprobs of this many most likely tokens", ge=0, le=TOP_LOGPROBS_MAX
    )
    metadata: Metadata | None = option("repeated in the response")
    user: str | None = option("identifies the end user")


REFUSED_BY_RESPONSES: Harmless = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "context_management": (None, []),
    "truncation": (None, "disabled"),
}
IGNORED_BY_RESPONSES: dict[str, str] = {
    "max_tool_calls": "limits hosted tools, which are refused",
    "prompt_cache_key": "requests are routed to their cached prefix",
    "prompt_cache_retention": "the engine decides how long a prefix stays cached",
    "safety_identifier": "identifies the end user",
    "service_tier": "the tier is set by X-Priority",
    "stream_options": "events are not padded",
}
