"""The bodies of requests, and what becomes of them: one `ParsedRequest`, the same for chat and for plain completions.

Unknown fields pass: clients send what their other servers understand. Those that would change the answer are refused
(`refused_fields.py`).
"""

from typing import Any

import msgspec
from msgspec import Struct

from controller.frontend.errors import ApiError, invalid, unsupported
from controller.frontend.requests.bodies import (
    N_MAX,
    STOPS_MAX,
    ChatBody,
    ChatMessage,
    CompletionBody,
    RequestBody,
    validated,
)
from controller.frontend.requests.fast_chat import PlainChat, plain_chat
from controller.frontend.requests.refused_fields import REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS, refuse


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


class ParsedRequest(Struct, kw_only=True, frozen=True):
    """A request as generations see it, whichever endpoint it came to."""

    chat: bool
    model: str
    stream: bool
    include_usage: bool
    n: int = 1
    sampling: RequestedSampling
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # the k of the top-k that are shown; None: not wanted
    guided: dict[str, Any] | None = None
    cache_salt: str = ""  # prefixes are shared only with requests that have the same
    messages: list[dict[str, Any]] | None = None  # of a chat
    template_extra: dict[str, Any] | None = None  # names for its template
    prompts: list[str | list[int]] | None = None  # of a completion: one answer each


GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


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
    refuse(body.model_extra, REFUSED_BY_CHAT)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    stop, guided = _stops(body.stop), _guided(body.model_extra)
    return _parsed(
        body,
        stop,
        guided,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        messages=[_plain(place, message) for place, message in enumerate(body.messages)],
        template_extra=body.chat_template_kwargs,
    )


def parse_completion(data: Any) -> ParsedRequest:
    """Return what a completions body asks for. Raise ApiError (400), naming the field."""
    body = validated(CompletionBody, data)
    refuse(body.model_extra, REFUSED_BY_COMPLETIONS)
    stop, guided = _stops(body.stop), _guided(body.model_extra)
    prompts = _prompts(body.prompt)
    parsed = _parsed(body, stop, guided, max_tokens=body.max_tokens, logprobs=body.logprobs, prompts=prompts)
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
        ),
        messages=[{"role": message.role, "content": message.content} for message in chat.messages],
    )


def _parsed(
    body: RequestBody,
    stop: tuple[str, ...],
    guided: dict[str, Any] | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    messages: list[dict[str, Any]] | None = None,
    template_extra: dict[str, Any] | None = None,
    prompts: list[str | list[int]] | None = None,
) -> ParsedRequest:
    return ParsedRequest(
        chat=messages is not None,
        model=body.model,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        n=body.n or 1,
        sampling=_sampling(body, max_tokens),
        stop=stop,
        logprobs=logprobs,
        guided=guided,
        cache_salt=body.cache_salt or "",
        messages=messages,
        template_extra=template_extra,
        prompts=prompts,
    )


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
    wanted = extra.get("response_format")
    if wanted is not None:
        if not isinstance(wanted, dict) or wanted.get("type") not in ("text", "json_object", "json_schema"):
            raise invalid("response_format.type must be text, json_object or json_schema", "response_format")
        if wanted["type"] != "text":
            found["response_format"] = wanted
    return found or None


def _plain(place: int, message: ChatMessage) -> dict[str, Any]:
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
