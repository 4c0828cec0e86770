"""The bodies of requests, and what becomes of them: one `ParsedRequest`, the same for chat and for plain completions.

Unknown fields pass: clients send what their other servers understand. Those that would change the answer are refused, and the
client is told of those that nobody knows (`refused_fields.py`).
"""

from typing import Any

import msgspec
from msgspec import Struct

from controller.frontend.errors import ApiError, invalid, quoted, unsupported
from controller.frontend.openai.fast_chat import PlainChat, plain_chat
from controller.frontend.openai.refused_fields import (
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    refuse,
    unknown_options,
)
from controller.frontend.openai.request_models import (
    N_MAX,
    STOP_CHARS_MAX,
    STOPS_MAX,
    ChatBody,
    ChatMessage,
    CompletionBody,
    RequestBody,
    validated,
)

DEFAULTED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Fields of sampling for which a model may have defaults of its own."""
_LATER = DEFAULTED[2:]  # what a plain chat never has
_PLAIN_UNSET = {
    (heat, top): (*(() if heat else DEFAULTED[:1]), *(() if top else DEFAULTED[1:2]), *_LATER)
    for heat in (False, True)
    for top in (False, True)
}
"""What a plain chat leaves out, by whether it has a temperature and a top_p."""


class RequestedSampling(Struct, kw_only=True, frozen=True):
    """How the client wants tokens to be chosen; what he leaves open has its default already."""

    max_tokens: int | None  # None: as many as the endpoint usually gives
    min_tokens: int = 0
    temperature: float
    top_p: float
    top_k: int = 0  # 0: all
    seed: int | None  # None: one of ours
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: dict[int, float] = {}
    unset: tuple[str, ...] = ()  # of `DEFAULTED`, those that the client left out


class AnswerDetails(Struct, kw_only=True, frozen=True):
    """What an answer says besides its text; few clients want any of it."""

    echo: bool = False  # the prompt, before it
    token_ids: bool = False
    usage: bool = False  # as it is so far, with every event


class ParsedRequest(Struct, kw_only=True, frozen=True):
    """A request as generations see it, whichever endpoint it came to."""

    chat: bool
    model: str
    called: str = ""  # the alias by which the client asks for the model; empty: by its own name
    stream: bool
    include_usage: bool
    n: int = 1
    sampling: RequestedSampling
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # the k of the top-k that are shown; None: not wanted
    logprobs_by_id: bool = False  # they name tokens by their ids
    details: AnswerDetails | None = None  # None: nothing but its text
    guided: dict[str, Any] | None = None
    cache_salt: str = ""  # prefixes are shared only with requests that have the same
    messages: list[dict[str, Any]] | None = None  # of a chat
    template_extra: dict[str, Any] | None = None  # names for its template
    template_reads: str = ""  # the field that its template must read, or else be refused
    unknown: tuple[str, ...] = ()  # fields of its body that nobody knows
    prompts: list[str | list[int]] | None = None  # of a completion: one answer each
    user: str = ""  # of the client's, whose request it is


USER_CHARS_MAX = 128
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
FORMS = ("text", "json_object", "json_schema")


def read_chat(body: bytes) -> ParsedRequest:
    """Return what a chat body asks for. Raise ApiError (400), naming the field."""
    plain = plain_chat(body)
    return _from_plain(plain) if plain is not None else parse_any_chat(read_json(body))


def read_completion(body: bytes) -> ParsedRequest:
    """Return what a completions body asks for. Raise ApiError (400), naming the field."""
    return parse_completion(read_json(body))


def read_json(body: bytes) -> Any:
    """Return what a body says. Raise ApiError (400) if it is not JSON."""
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
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        messages=[plain_message(place, message) for place, message in enumerate(body.messages)],
        template_extra=extra or None,
        template_reads="" if body.reasoning_effort is None else "reasoning_effort",
    )


def _tools(body: ChatBody) -> bool:
    """Say whether there are tools, none of which is to be called: the chat template may tell of them. Raise ApiError (400)."""
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
        sampling=RequestedSampling(
            max_tokens=chat.max_completion_tokens or chat.max_tokens,
            temperature=1.0 if chat.temperature is None else chat.temperature,
            top_p=1.0 if chat.top_p is None else chat.top_p,
            seed=chat.seed,
            ignore_eos=chat.ignore_eos,
            unset=_PLAIN_UNSET[chat.temperature is not None, chat.top_p is not None],
        ),
        messages=[{"role": message.role, "content": message.content} for message in chat.messages],
    )


def _parsed(
    body: RequestBody,
    unknown: tuple[str, ...],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
    messages: list[dict[str, Any]] | None = None,
    template_extra: dict[str, Any] | None = None,
    template_reads: str = "",
    prompts: list[str | list[int]] | None = None,
) -> ParsedRequest:
    options = body.stream_options
    if options is not None:
        unknown = (*unknown, *unknown_options(options.model_extra))
    each = _usage_with_each(body)
    wanted = echo or each or body.return_token_ids
    return ParsedRequest(
        chat=messages is not None,
        model=body.model,
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
        n=body.n or 1,
        sampling=_sampling(body, max_tokens),
        stop=_stops(body.stop),
        logprobs=logprobs,
        logprobs_by_id=bool(body.return_tokens_as_token_ids),
        details=AnswerDetails(echo=echo, token_ids=bool(body.return_token_ids), usage=each)
        if wanted
        else None,
        guided=_guided(body),
        cache_salt=body.cache_salt or "",
        messages=messages,
        template_extra=template_extra,
        template_reads=template_reads,
        unknown=unknown,
        prompts=prompts,
        user=_user(body),
    )


def _user(body: RequestBody) -> str:
    """Return whose request it is, as far as its body says."""
    user = (body.model_extra or {}).get("user")
    return user[:USER_CHARS_MAX] if isinstance(user, str) else ""


def _usage_with_each(body: RequestBody) -> bool:
    """Say whether each event of a stream carries the usage. Raise ApiError (400) for options of what is no stream, or that want
    more of one than its whole usage."""
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise invalid("stream_options: only with stream: true", "stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise invalid("stream_options: continuous_usage_stats needs include_usage: true", "stream_options")
    return options.continuous_usage_stats


def _sampling(body: RequestBody, max_tokens: int | None) -> RequestedSampling:
    return RequestedSampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        min_p=body.min_p or 0.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items() if bias},
        unset=tuple(name for name in DEFAULTED if getattr(body, name) is None),
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
    extra = message.model_extra or {}
    content: str | list[dict[str, str]] = ""
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise unsupported(f"messages.{place}.content", f"parts of the type {quoted(part.type)!r}")
        content = [{"type": "text", "text": part.text or ""} for part in message.content] or ""
    elif message.content is not None:
        content = message.content
    calls = message.role == "assistant" and (extra.get("tool_calls") or extra.get("function_call"))
    nothing = message.content is None or message.content == []
    if nothing and not calls and not (message.role == "tool" and message.content is not None):
        why = "a message must have content; only an assistant's with tool_calls may have none"
        raise invalid(f"messages.{place}.content: {why}", f"messages.{place}.content")
    return {"role": message.role, **extra, "content": content}


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
