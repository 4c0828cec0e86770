"""What a body may have: pydantic's models of both kinds of request, and what a client is told of a wrong field.

`/openapi.json` is made of these models; of what they do not have, `refused_fields` says what becomes of it.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from controller.frontend.errors import invalid, quoted

STOPS_MAX = 16
STOP_CHARS_MAX = 4_096  # of all of them: what is held back of an answer at most
N_MAX = 16
TOP_LOGPROBS_MAX = 20
MESSAGES_MAX = 10_000  # what comes in by the million would hold up everybody's streams while it is read
PARTS_MAX = 1_000
STOP_IDS_MAX = 1_000
LOGIT_BIAS_MAX = 1_024
TOOLS_MAX = 128
SALT_CHARS_MAX = 256

B = TypeVar("B", bound=BaseModel)
Token = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenName = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$", description="a token id")]


def _no_more(most: int, what: str) -> BeforeValidator:
    """Refuse a mapping of too many entries before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} {what}")
        return value

    return BeforeValidator(check)


def _read_later(*schemas: dict[str, Any]) -> WithJsonSchema:
    """Say what a field may be that `schema` reads, because a look at all of it must wait until it is known to be short."""
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})


_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STOP = {**_TEXT, "maxLength": STOP_CHARS_MAX}
_STOPS = {"type": "array", "items": _STOP, "maxItems": STOPS_MAX}
_PROMPTS = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": N_MAX}
_TOKEN_PROMPTS = {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": N_MAX}


class StreamOptions(BaseModel):
    """What a stream carries besides tokens."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = Field(default=False, description="a last event with the usage")
    continuous_usage_stats: bool = Field(
        default=False, description="the usage so far with every event; needs include_usage"
    )


class RequestBody(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(extra="allow", strict=False, protected_namespaces=())

    model: str = Field(description="a name that /v1/models lists")
    stream: bool = Field(default=False, description="an event for each token, instead of the whole answer")
    stream_options: StreamOptions | None = Field(
        default=None, description="include_usage, continuous_usage_stats; only with stream: true"
    )
    max_tokens: int | None = Field(default=None, ge=1, description="tokens of the answer at most")
    min_tokens: int | None = Field(default=None, ge=0, description="no end of the answer before so many")
    temperature: float | None = Field(
        default=None, ge=0, le=2, allow_inf_nan=False, description="0: always the likeliest token; usually 1"
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="draw from the likeliest tokens that have this share together"
    )
    top_k: int | None = Field(
        default=None, ge=-1, lt=2**31, description="draw from so many likeliest tokens; 0, -1: all"
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="draw from tokens with this share of the likeliest one's probability",
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="the same draws every time")
    stop: Annotated[Any, _read_later(_STOP, _STOPS)] = Field(
        default=None,
        description=f"a text that ends the answer, or {STOPS_MAX} of them at most, with {STOP_CHARS_MAX:,} characters together",
    )
    stop_token_ids: list[Token] | None = Field(
        default=None, max_length=STOP_IDS_MAX, description="tokens that end the answer"
    )
    n: int | None = Field(default=None, ge=1, le=N_MAX, description="answers to each prompt")
    ignore_eos: bool = Field(default=False, description="go on behind the end of the answer")
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=SALT_CHARS_MAX,
        description="share prefixes only with requests that have the same",
    )
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="taken off the logits of tokens that the answer has said"
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="likewise, once for each time that it has"
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="what divides the logits of tokens of the answer and the prompt; 1: nothing",
    )
    logit_bias: Annotated[dict[TokenName, Bias] | None, _no_more(LOGIT_BIAS_MAX, "tokens")] = Field(
        default=None, max_length=LOGIT_BIAS_MAX, description="by token id: what is added to its logit"
    )
    return_token_ids: bool | None = Field(
        default=None, description="give token_ids beside the text, and prompt_token_ids"
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description='name the tokens of logprobs "token_id:N"'
    )
    response_format: dict[str, Any] | None = Field(
        default=None, description="the form of the answer: type text, json_object or json_schema"
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="the form of the answer, as vLLM has it: json, regex, choice, grammar …"
    )
    guided_json: dict[str, Any] | str | None = Field(default=None, description="structured_outputs.json")
    guided_regex: str | None = Field(default=None, description="structured_outputs.regex")
    guided_choice: list[str] | None = Field(default=None, description="structured_outputs.choice")
    guided_grammar: str | None = Field(default=None, description="structured_outputs.grammar")


class Part(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message of a conversation. What it has besides is the chat template's to read."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[Part], Field(max_length=PARTS_MAX)] | None = Field(
        default=None, description="only an assistant's message with tool_calls may have none"
    )


class ChatBody(RequestBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(
        min_length=1, max_length=MESSAGES_MAX, description="the conversation so far"
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="max_tokens, before which it goes"
    )
    logprobs: bool | None = Field(default=None, description="of each token that was chosen")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=TOP_LOGPROBS_MAX, description="and of so many best ones; needs logprobs: true"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="names that the chat template may read"
    )
    tools: list[dict[str, Any]] | None = Field(
        default=None, max_length=TOOLS_MAX, description='only with tool_choice: "none"'
    )
    tool_choice: Annotated[Any, _read_later({"enum": ["none", "auto"]})] = Field(
        default=None, description='"none"; "auto" where there are no tools'
    )
    reasoning_effort: str | None = Field(
        default=None, description="for models whose chat template reads it", max_length=32
    )


class CompletionBody(RequestBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TOKENS, _PROMPTS, _TOKEN_PROMPTS]})] = Field(
        description=f"a text, token ids, or a list of {N_MAX} of either at most"
    )
    max_tokens: int | None = Field(
        default=None, ge=0, description="tokens of the answer at most; with echo 0: the prompt alone"
    )
    echo: bool | None = Field(default=None, description="say the prompt before the answer")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=TOP_LOGPROBS_MAX,
        description="of each token that was chosen, and of so many best ones",
    )


def validated(model: type[B], data: Any) -> B:
    """Return a body as this model has it. Raise ApiError (400), naming the field."""
    if not isinstance(data, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        place = [step for step in found[0]["loc"] if not _is_type(step)]
        same = [one for one in found if list(one["loc"][: len(place)]) == place]
        first = same[-1]  # of a union: what is wrong with the list, not that it is no text
        where = [str(step) for step in first["loc"] if not _is_type(step)]
        field = quoted(".".join(where))  # the names in a mapping are the client's
        raise invalid(f"{field}: {first['msg']}", quoted(where[0]) if where else None) from error


def _is_type(step: int | str) -> bool:
    """Say whether a step of pydantic's path is the name of a union's branch, which means nothing to a client."""
    return isinstance(step, str) and (step in ("str", "int") or "[" in step)
