"""The bodies of requests, and what becomes of them: one `Ask`, the same for chat and for plain completions.

Unknown fields pass: clients send what their other servers understand. Fields that would change the answer and
that nobody here obeys are refused, by name.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controller.frontend.errors import ApiError, invalid, unsupported
from controller.frontend.plain_chat import PlainChat, plain_chat

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
    """What a stream should say besides tokens."""

    include_usage: bool = False


class Body(BaseModel):
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


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[Part], Field(max_length=PARTS_MAX)] | None = None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MESSAGES_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)


class Ask(Struct, kw_only=True):
    """A request as the flights see it, whatever its form was. `logprobs` None: not wanted; else the top-k's k."""

    chat: bool
    model: str
    stream: bool
    include_usage: bool
    max_tokens: int | None
    min_tokens: int = 0
    temperature: float
    top_p: float
    top_k: int = 0
    seed: int | None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    ignore_eos: bool
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    guided: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str = ""  # prefixes are shared only with requests that have the same
    template_extra: dict[str, Any] | None = None
    prompts: list[str | list[int]] | None = None  # completions: one answer each


# Fields that change the answer, and the values that are harmless.
_REFUSED_BY_BOTH: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    # vLLM's and SGLang's own
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "stop_regex": (None, "", []),
    "include_stop_str_in_output": (None, False),
    "no_stop_trim": (None, False),
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "lora_path": (None,),
    "custom_logit_processor": (None,),
    "logits_processors": (None, []),
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "structural_tag": (None,),
}
_REFUSED_BY_CHAT: dict[str, tuple[Any, ...]] = _REFUSED_BY_BOTH | {
    "tools": (None, []),
    "functions": (None, []),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
}
_REFUSED_BY_COMPLETIONS: dict[str, tuple[Any, ...]] = _REFUSED_BY_BOTH | {
    "echo": (None, False),
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
}
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


def read_chat(body: bytes) -> Ask:
    """Return the Ask of a chat body. Raise ApiError, naming the field."""
    plain = plain_chat(body)
    return _plain_ask(plain) if plain is not None else parse_any_chat(read_json(body))


def read_completion(body: bytes) -> Ask:
    """Return the Ask of a completions body. Raise ApiError, naming the field."""
    return parse_completion(read_json(body))


def read_json(body: bytes) -> Any:
    """Return what a body says. Raise ApiError if it is not JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_json(str(error)) from error


def parse_any_chat(data: Any) -> Ask:
    """Return the Ask of a chat body that may have any field. Raise ApiError, naming the field."""
    body = validated(ChatBody, data)
    _refuse(body, _REFUSED_BY_CHAT)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    ask = _ask(body, chat=True, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    ask.max_tokens = body.max_completion_tokens or body.max_tokens
    ask.messages = [_plain(place, message) for place, message in enumerate(body.messages)]
    ask.template_extra = body.chat_template_kwargs
    return ask


def parse_completion(data: Any) -> Ask:
    """Return the Ask of a completions body. Raise ApiError, naming the field."""
    body = validated(CompletionBody, data)
    _refuse(body, _REFUSED_BY_COMPLETIONS)
    ask = _ask(body, chat=False, logprobs=body.logprobs)
    ask.prompts = _prompts(body.prompt)
    if len(ask.prompts) * ask.n > N_MAX:
        raise invalid(f"prompts times n is more than {N_MAX}", "prompt")
    return ask


def validated(model: type[B], data: Any) -> B:
    """Return a body as this model has it. Raise ApiError, naming the field."""
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


def _refuse(body: Body, refused: dict[str, tuple[Any, ...]]) -> None:
    extra = body.model_extra
    if not extra:
        return
    for name, harmless in refused.items():
        if name in extra and extra[name] not in harmless:
            raise unsupported(name)


def _plain_ask(chat: PlainChat) -> Ask:
    options = chat.stream_options
    return Ask(
        chat=True,
        model=chat.model,
        stream=chat.stream,
        include_usage=options is not None and options.include_usage,
        max_tokens=chat.max_completion_tokens or chat.max_tokens,
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        seed=chat.seed,
        ignore_eos=chat.ignore_eos,
        messages=[{"role": message.role, "content": message.content} for message in chat.messages],
    )


def _ask(body: Body, *, chat: bool, logprobs: int | None) -> Ask:
    return Ask(
        chat=chat,
        model=body.model,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        max_tokens=body.max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        n=body.n or 1,
        ignore_eos=body.ignore_eos,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logprobs=logprobs,
        guided=_guided(body.model_extra),
        cache_salt=body.cache_salt or "",
    )


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        raise invalid("stop must be text or a list of texts", "stop")
    if len(stops) > STOPS_MAX:
        raise invalid(f"at most {STOPS_MAX} stop strings", "stop")
    if not all(isinstance(text, str) for text in stops):
        raise invalid("stop must be text or a list of texts", "stop")
    if not all(stops):
        raise invalid("a stop string must not be empty", "stop")
    return tuple(stops)


def _guided(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what constrains the answer's form, for engines that can obey it."""
    if not extra:
        return None
    found = {name: extra[name] for name in GUIDED if extra.get(name) is not None}
    form = extra.get("response_format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
            raise invalid("response_format.type must be text, json_object or json_schema", "response_format")
        if form["type"] != "text":
            found["response_format"] = form
    return found or None


def _plain(place: int, message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: its content as one text."""
    plain = {"role": message.role, **(message.model_extra or {})}
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise unsupported(f"messages.{place}.content", f"parts of the type {part.type!r}")
        plain["content"] = "".join(part.text or "" for part in message.content)
    else:
        plain["content"] = message.content or ""
    return plain


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Return one or several prompts. What a list holds is looked at when it is known to be no longer than a context."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid("prompt must be text, token ids, or a list of these", "prompt")
    if not prompt:
        raise invalid("prompt must not be empty", "prompt")
    if type(prompt[0]) is int:
        return [prompt]
    if len(prompt) > N_MAX:
        raise invalid(f"at most {N_MAX} prompts", "prompt")
    if not all(isinstance(one, str) for one in prompt) and not all(isinstance(one, list) for one in prompt):
        raise invalid("prompt must be text, token ids, or a list of these", "prompt")
    return list(prompt)


def bad_json(why: str) -> ApiError:
    """Return the 400 for a body that is not JSON."""
    return invalid(f"the body is not JSON: {why}", code="invalid_json")
