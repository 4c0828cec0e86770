"""Models of the bodies of Anthropic's Messages API, and the tables of refused and ignored fields.

As in `request_models`, a field that is neither in a model nor in a table is accepted, and the header `Warning` names it.
"""

from typing import Annotated, Literal

from pydantic import Field

from controller.frontend.openai.request_models import (
    FUNCTION_NAME_MAX,
    MESSAGES_MAX,
    PARTS_MAX,
    STOP_CHARS_MAX,
    STOPS_MAX,
    TOOLS_MAX,
    Harmless,
    Json,
    Lenient,
    option,
)


class ContentPart(Lenient):
    """One part of a system prompt or of a tool's result. Only text is supported."""

    type: str
    text: str | None = None


Parts = Annotated[list[ContentPart], Field(max_length=PARTS_MAX)]


class ContentBlock(Lenient):
    """One block of a message: text, thinking, redacted_thinking, tool_use or tool_result."""

    type: str
    text: str | None = option("of a text block")
    thinking: str | None = option("of a thinking block")
    id: str | None = option("of a tool_use block")
    name: str | None = option("of a tool_use block")
    input: Json | None = option("of a tool_use block: the arguments")
    tool_use_id: str | None = option("of a tool_result block")
    content: str | Parts | None = option("of a tool_result block: a text, or text blocks")


class MessageParam(Lenient):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(max_length=PARTS_MAX)]


class ToolParam(Lenient):
    """A tool that the model may use. Only tools of the client are supported, which have an `input_schema`."""

    type: str | None = option("custom, or left out; tools of the server are refused")
    name: str = Field(min_length=1, max_length=FUNCTION_NAME_MAX)
    description: str | None = option("what the tool does, for the model")
    input_schema: Json | None = option("JSON schema of the tool's arguments; required")


class ToolChoiceParam(Lenient):
    """Whether the model uses a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = option("of the tool, with type tool")
    disable_parallel_tool_use: bool | None = option("true: at most one call in an answer")


class Thinking(Lenient):
    """Whether the model thinks before its answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = option("omitted: leave out the thinking")


class OutputConfig(Lenient):
    """The form of the answer, and the effort for it."""

    effort: str | None = option("for models with a chat template that reads reasoning_effort", max_length=32)
    format: Json | None = option("format of the answer: type json_schema with a schema")


class Metadata(Lenient):
    """The client's notes about a request."""

    user_id: str | None = option("identifies the end user")


class CountTokensBody(Lenient):
    """POST /v1/messages/count_tokens."""

    model: str = option("a name listed by /v1/models; optional if only one model is served", "")
    messages: Annotated[
        list[MessageParam],
        Field(min_length=1, max_length=MESSAGES_MAX, description="the conversation so far"),
    ]
    system: str | Parts | None = option("the system prompt: a text, or text blocks")
    tools: list[ToolParam] | None = option("tools that the model may use", max_length=TOOLS_MAX)
    tool_choice: ToolChoiceParam | None = option(
        "auto (default with tools), any, tool with its name, or none"
    )
    thinking: Thinking | None = option(
        "enabled or disabled: sets enable_thinking and thinking for chat templates that read one of them; "
        "adaptive: the template's default"
    )
    output_config: OutputConfig | None = option("effort, and format of the answer")


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, description="maximum tokens of the answer")
    stream: bool = option("send events instead of the whole answer", False)
    temperature: float | None = option("sampling temperature; default 1", ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = option("sample from the most likely tokens with this total probability", gt=0, le=1)
    top_k: int | None = option("sample from this many most likely tokens; 0: all", ge=0, lt=2**31)
    stop_sequences: list[str] | None = option(
        f"at most {STOPS_MAX} texts that end the answer, with {STOP_CHARS_MAX:,} characters in total"
    )
    metadata: Metadata | None = option("user_id identifies the end user")


REFUSED_BY_MESSAGES: Harmless = {"container": (None,), "mcp_servers": (None, [])}
IGNORED_BY_MESSAGES: dict[str, str] = {
    "cache_control": "cached prefixes are always used",
    "service_tier": "the tier is set by X-Priority",
    "inference_geo": "the fleet decides where it runs",
    "anthropic_version": "there is one version of this endpoint",
    "anthropic_beta": "features are not selected by name",
}
IGNORED_BY_COUNT_TOKENS = IGNORED_BY_MESSAGES | {
    name: "has no effect on the prompt"
    for name in MessagesBody.model_fields
    if name not in CountTokensBody.model_fields
}
