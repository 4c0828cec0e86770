"""What a body may have: pydantic's models of both kinds of request, and what a client is told of a wrong field."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controller.frontend.errors import invalid

STOPS_MAX = 16
N_MAX = 16
TOP_LOGPROBS_MAX = 20
MESSAGES_MAX = 10_000  # what comes in by the million would hold up everybody's streams while it is read
PARTS_MAX = 1_000
STOP_IDS_MAX = 1_000
SALT_CHARS_MAX = 256

B = TypeVar("B", bound=BaseModel)
Token = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """What a stream carries besides tokens."""

    include_usage: bool = False


class RequestBody(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(extra="allow", strict=False, protected_namespaces=())

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Any = None
    stop_token_ids: list[Token] | None = Field(default=None, max_length=STOP_IDS_MAX)
    n: int | None = Field(default=None, ge=1, le=N_MAX)
    ignore_eos: bool = False
    cache_salt: str | None = Field(default=None, min_length=1, max_length=SALT_CHARS_MAX)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)


class Part(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[Part], Field(max_length=PARTS_MAX)] | None = None


class ChatBody(RequestBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MESSAGES_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(RequestBody):
    """POST /v1/completions."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)


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
        field = ".".join(where)
        raise invalid(f"{field}: {first['msg']}", where[0] if where else None) from error


def _is_type(step: int | str) -> bool:
    """Say whether a step of pydantic's path is the name of a union's branch, which means nothing to a client."""
    return isinstance(step, str) and (step in ("str", "int") or "[" in step)
