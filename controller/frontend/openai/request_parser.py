"""Parsers of request bodies: one `ParsedRequest`, the same for chat and for plain completions, and those of the small endpoints.

Unknown fields pass: clients send what their other servers understand. Those that would change the answer are refused, and the
client is told of those that are not known (`request_models.py` has the tables).
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from pydantic import BaseModel, ValidationError

from controller.frontend.errors import ApiError, invalid, quoted, unsupported
from controller.frontend.openai.request_models import (
    IGNORED,
    N_MAX,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    REFUSED_BY_TOKENIZE,
    STOP_CHARS_MAX,
    STOPS_MAX,
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    PlainChat,
    RequestBody,
    StreamOptions,
    TokenizeChatBody,
    TokenizePromptBody,
)
from events.wire import Sampling

B = TypeVar("B", bound=BaseModel)
DEFAULTED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Fields of sampling for which a model may have defaults of its own."""
SAMPLING = {*DEFAULTED, "min_tokens", "seed", "ignore_eos", "stop_token_ids", "logit_bias"}
"""Fields of a body that mean the same in Sampling."""
_PLAIN_UNSET = {
    (False, False): [*DEFAULTED],
    (True, False): [*DEFAULTED[1:]],
    (False, True): [DEFAULTED[0], *DEFAULTED[2:]],
    (True, True): [*DEFAULTED[2:]],
}
"""What a plain chat leaves out, by whether it has a temperature and a top_p."""


class AnswerDetails(Struct, kw_only=True, frozen=True):
    """What an answer shows besides its text; few clients want any of it."""

    echo: bool = False  # the prompt, before it
    token_ids: bool = False
    usage: bool = False  # as it is so far, with every event


NO_DETAILS = AnswerDetails()


class ParsedRequest(Struct, kw_only=True, frozen=True):
    """A request as generations see it, whichever endpoint it came to."""

    chat: bool
    model: str
    called: str = ""  # the alias by which the client asks for the model; empty: by its own name
    stream: bool
    include_usage: bool
    n: int = 1
    max_tokens: int | None = None  # None: as many as the endpoint usually gives
    # What the client left out has its usual value, and is named in `unset`; what depends on the prompt is set later
    sampling: Sampling
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # the k of the top-k that are shown; None: not wanted
    logprobs_by_id: bool = False  # they name tokens by their ids
    details: AnswerDetails = NO_DETAILS
    guided: dict[str, Any] | None = None
    cache_salt: str = ""  # prefixes are shared only with requests that have the same
    messages: list[dict[str, Any]] | None = None  # of a chat
    template_extra: dict[str, Any] | None = None  # names for its template
    template_reads: str = ""  # the field that its template must read, or else be refused
    unknown: tuple[str, ...] = ()  # fields of its body that are not known
    prompts: list[str | list[int]] | None = None  # of a completion: one answer each
    user: str = ""  # the end user, as the body names it


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    """What a body of /tokenize asks for: the tokens of a text, or of a conversation."""

    model: str | None
    text: str | None = None  # None: it has messages
    messages: list[dict[str, Any]] = []
    template_names: dict[str, Any] = {}  # for the chat template
    special: bool
    token_strs: bool
    unknown: tuple[str, ...] = ()


class DetokenizeRequest(Struct, kw_only=True, frozen=True):
    """What a body of /detokenize asks for."""

    model: str | None
    tokens: list[int]
    unknown: tuple[str, ...] = ()


USER_CHARS_MAX = 128
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
FORMS = ("text", "json_object", "json_schema")
_plain = msgspec.json.Decoder(PlainChat)


def parse_body(kind: str, body: bytes) -> Any:
    """Return what a body of this kind (a key of KINDS) asks for. Raise ApiError (400), naming the field."""
    return read_chat(body) if kind == "chat_completions" else KINDS[kind][0](read_json(body))


def read_chat(body: bytes) -> ParsedRequest:
    """Return what a chat body asks for. Raise ApiError (400), naming the field."""
    plain = plain_chat(body)
    return _from_plain(plain) if plain is not None else parse_any_chat(read_json(body))


def read_json(body: bytes) -> Any:
    """Return a decoded body. Raise ApiError (400) if it is not JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_json(str(error)) from error


def parse_any_chat(data: Any) -> ParsedRequest:
    """Return what a chat body that may have any field asks for. Raise ApiError (400), naming the field."""
    body = validated(ChatBody, data)
    unknown = refuse(body.model_extra, REFUSED_BY_CHAT)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    extra = dict(body.chat_template_kwargs or {})
    if _tools(body):
        extra.setdefault("tools", body.tools)
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    return _parsed(
        body,
        unknown,
        chat=True,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        messages=[plain_message(place, message) for place, message in enumerate(body.messages)],
        template_extra=extra or None,
        template_reads="" if body.reasoning_effort is None else "reasoning_effort",
    )


def _tools(body: ChatBody) -> bool:
    """Return whether there are tools for the chat template to show, none of which is to be called. Raise ApiError (400)."""
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools", 'answers have no tool calls; with tool_choice: "none" tools pass')
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "there are no tools that could be called")
    return bool(body.tools)


def parse_completion(data: Any) -> ParsedRequest:
    """Return what a completions body asks for. Raise ApiError (400), naming the field."""
    body = validated(CompletionBody, data)
    unknown = refuse(body.model_extra, REFUSED_BY_COMPLETIONS)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens: 0 tokens are no answer, but with echo: true", "max_tokens")
    prompts = _prompts(body.prompt)
    parsed = _parsed(
        body,
        unknown,
        chat=False,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompts=prompts,
        echo=bool(body.echo),
    )
    if len(prompts) * parsed.n > N_MAX:
        raise invalid(f"prompts times n is more than {N_MAX}", "prompt")
    return parsed


def _from_plain(chat: PlainChat) -> ParsedRequest:
    options = chat.stream_options
    return ParsedRequest(
        chat=True,
        model=chat.model,
        stream=chat.stream,
        include_usage=options is not None and options.include_usage,
        max_tokens=chat.max_completion_tokens or chat.max_tokens,
        sampling=Sampling(
            0,
            temperature=1.0 if chat.temperature is None else chat.temperature,
            top_p=1.0 if chat.top_p is None else chat.top_p,
            seed=chat.seed,
            ignore_eos=chat.ignore_eos,
            unset=_PLAIN_UNSET[chat.temperature is not None, chat.top_p is not None],
        ),
        messages=[{"role": message.role, "content": message.content} for message in chat.messages],
    )


def _parsed(body: RequestBody, unknown: tuple[str, ...], *, echo: bool = False, **own: Any) -> ParsedRequest:
    """Return what a body asks for; `own`: the fields of ParsedRequest that only one of the endpoints has, or each differently.
    Raise ApiError (400)."""
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream: true", "stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise invalid("stream_options: continuous_usage_stats needs include_usage: true", "stream_options")
    named = (f"stream_options.{name}" for name in options.model_extra or ())
    user = (body.model_extra or {}).get("user")
    return ParsedRequest(
        model=body.model,
        stream=body.stream,
        include_usage=options.include_usage,
        n=body.n or 1,
        sampling=_sampling(body),
        stop=_stops(body.stop),
        logprobs_by_id=bool(body.return_tokens_as_token_ids),
        details=AnswerDetails(
            echo=echo, token_ids=bool(body.return_token_ids), usage=options.continuous_usage_stats
        ),
        guided=_guided(body),
        cache_salt=body.cache_salt or "",
        unknown=(*unknown, *(name for name in named if name not in IGNORED)),
        user=user[:USER_CHARS_MAX] if isinstance(user, str) else "",
        **own,
    )


def _sampling(body: RequestBody) -> Sampling:
    given: dict[str, Any] = {"max_tokens": 0, "temperature": 1.0}
    given |= {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    given["top_k"] = max(0, body.top_k or 0)
    given["logit_bias"] = {int(token): bias for token, bias in (body.logit_bias or {}).items() if bias}
    return Sampling(**given, unset=[name for name in DEFAULTED if getattr(body, name) is None])


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
    if (chars := sum(map(len, stops))) > STOP_CHARS_MAX:
        raise invalid(f"stop strings may have {STOP_CHARS_MAX} characters together, not {chars}", "stop")
    return tuple(stops)


def _guided(body: RequestBody) -> dict[str, Any] | None:
    """Return what constrains the answer's form, for engines that can obey it. Raise ApiError (400)."""
    found = {name: value for name in GUIDED if (value := getattr(body, name)) is not None}
    wanted = body.response_format
    if wanted is not None:
        if wanted.get("type") not in FORMS:
            raise invalid(
                f"response_format.type must be {', '.join(FORMS[:-1])} or {FORMS[-1]}", "response_format"
            )
        if wanted["type"] != "text":
            found["response_format"] = wanted
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(
            f"{second}: the form of an answer is constrained by one field; {first} does already", second
        )
    return found or None


def plain_message(place: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message for the chat template: its content as a text or as text parts. Raise ApiError (400)."""
    extra, content, where = message.model_extra or {}, message.content, f"messages.{place}.content"
    for part in content if isinstance(content, list) else ():
        if part.type != "text" or part.text is None:
            raise unsupported(where, f"parts of the type {quoted(part.type)!r}")
    calls = message.role == "assistant" and (extra.get("tool_calls") or extra.get("function_call"))
    if not calls and (content is None or (content == [] and message.role != "tool")):
        why = "a message must have content; only an assistant's with tool_calls may have none"
        raise invalid(f"{where}: {why}", where)
    if isinstance(content, list):
        return {
            "role": message.role,
            **extra,
            "content": [{"type": "text", "text": part.text} for part in content] or "",
        }
    return {"role": message.role, **extra, "content": content or ""}


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Return one or several prompts. The items of a list are checked later, when it is known to be no longer than a context."""
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


def plain_chat(body: bytes) -> PlainChat | None:
    """Return a body as a plain chat; None if it is not plain, or no JSON."""
    try:
        found = _plain.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if found.stream_options is not None and not found.stream else found


def parse_tokenize(data: Any) -> TokenizeRequest:
    """Return what a body of /tokenize asks for. Raise ApiError (400), naming the field."""
    chat = isinstance(data, dict) and "messages" in data
    if chat and "prompt" in data:
        raise invalid("either prompt, or messages", "prompt")
    body = validated(TokenizeChatBody, data) if chat else validated(TokenizePromptBody, data)
    unknown = refuse(body.model_extra, REFUSED_BY_TOKENIZE)
    text, messages, names = None, [], dict[str, Any]()
    if isinstance(body, TokenizePromptBody):
        text = body.prompt
    else:
        names = {"tools": body.tools} if body.tools else {}
        names |= body.chat_template_kwargs or {}
        names["add_generation_prompt"] = body.add_generation_prompt
        messages = [plain_message(place, message) for place, message in enumerate(body.messages)]
    return TokenizeRequest(
        model=body.model,
        text=text,
        messages=messages,
        template_names=names,
        special=body.add_special_tokens,
        token_strs=bool(body.return_token_strs),
        unknown=unknown,
    )


def parse_detokenize(data: Any) -> DetokenizeRequest:
    """Return what a body of /detokenize asks for. Raise ApiError (400), naming the field."""
    asked = validated(DetokenizeBody, data)
    return DetokenizeRequest(model=asked.model, tokens=asked.tokens, unknown=refuse(asked.model_extra, {}))


KINDS: dict[str, tuple[Any, Any]] = {
    "chat_completions": (parse_any_chat, ParsedRequest),
    "completions": (parse_completion, ParsedRequest),
    "tokenize": (parse_tokenize, TokenizeRequest),
    "detokenize": (parse_detokenize, DetokenizeRequest),
    "json": (lambda data: data, Any),
}
"""By the kind of a body: what parses it when it is decoded, and the type of the result."""


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
    """Return whether a step of pydantic's path is the name of a union's branch, which means nothing to a client."""
    return isinstance(step, str) and (step in ("str", "int") or "[" in step)


def refuse(extra: Mapping[str, Any] | None, refused: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """Return the fields in `extra` that are not known. Raise ApiError (400) for the first of the `refused` ones that has a value
    which is not harmless."""
    given = extra or {}
    for name, value in given.items():
        if name in refused and value not in refused[name]:
            raise unsupported(name)
    return tuple(name for name in given if name not in refused and name not in IGNORED)


def bad_json(why: str) -> ApiError:
    """Return the 400 for a body that is not JSON."""
    return invalid(f"the body is not JSON: {why}", code="invalid_json")
