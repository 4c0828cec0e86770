"""What has the client sent? From a request's bytes to its prompts in tokens."""

import os
import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from multidict import CIMultiDictProxy

from controller.frontend.errors import invalid, too_long, unsupported
from controller.frontend.openai.intake import Intake
from controller.frontend.openai.request_parser import ParsedRequest
from controller.frontend.openai.text.tokenizer import Tokens

REQUEST_ID_MAX = 128
SHOWN_MAX = 8  # unknown fields that are named, and characters of a name
NAME_MAX = 40
ID_BYTES = 16  # random ones; an id is their hex digits
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


async def read_prompts(
    parsed: ParsedRequest, tokens: Tokens, context: int, intake: Intake
) -> list[tuple[list[int], str]]:
    """Return each prompt as tokens, and as text if it was one.

    `context`: tokens of the model's context; a prompt must have fewer. Raise ApiError: 400, or 503 where too much is to be
    tokenised; or BadTemplate.
    """
    if parsed.sampling.logit_bias:
        _check_bias(parsed.sampling.logit_bias, tokens.size)
    # Whose prefixes are nobody else's, his texts are not either: how fast one is read would say whether it was read before
    shared = not parsed.cache_salt
    if parsed.messages is not None:
        if tokens.template is None:
            message = "this model has no chat template; use /v1/completions"
            raise invalid(message, "messages", "no_chat_template")
        if parsed.template_reads and not tokens.template.reads(parsed.template_reads):
            raise unsupported(parsed.template_reads, "this model's chat template does not read it")
        text = tokens.template.render(parsed.messages, **(parsed.template_extra or {}))
        _check_length(text, tokens, context, intake, "messages")
        read = intake.long_texts.read
        return [(await tokens.encode_soon(text, special=False, shared=shared, beside=read), text)]
    return await _read_plain(parsed.prompts or (), tokens, context, intake, shared)


async def _read_plain(
    prompts: Sequence[str | list[int]], tokens: Tokens, context: int, intake: Intake, shared: bool
) -> list[tuple[list[int], str]]:
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_length(prompt, tokens, context, intake, "prompt")
    out, read = [], intake.long_texts.read
    for prompt in prompts:
        if isinstance(prompt, str):
            out.append((await tokens.encode_soon(prompt, special=True, shared=shared, beside=read), prompt))
        else:
            out.append((_token_ids(prompt, tokens.size, context), ""))
    if any(not prompt for prompt, _ in out):
        raise invalid("prompt must not be empty", "prompt")
    return out


def _check_length(text: str, tokens: Tokens, context: int, intake: Intake, param: str) -> None:
    """Refuse a text that cannot fit before it is tokenised, which takes a second for a megabyte. Raise ApiError (400)."""
    least = tokens.tokens_min(text, context - 1)
    if least >= context:
        intake.refused("text_length")
        raise too_long(least, context, param, least=True)


def _check_bias(bias: dict[int, float], size: int) -> None:
    highest = max(bias)
    if highest >= size:
        raise invalid(f"logit_bias: the token {highest} is not below {size}", "logit_bias")


def _token_ids(given: list[Any], size: int, context: int) -> list[int]:
    """Return a prompt of token ids. One that is too long is refused unread: a look at millions holds everybody up."""
    if len(given) >= context:
        raise too_long(len(given), context, "prompt")
    if not all(type(token) is int for token in given):
        raise invalid("prompt must be text, token ids, or a list of these", "prompt")
    if not all(0 <= token < size for token in given):
        raise invalid(f"a token of the prompt is below zero, or not below {size}", "prompt")
    return given


def id_header(request: web.BaseRequest) -> dict[str, str]:
    """Return the header that names a request, in every answer to it."""
    return {"X-Request-Id": own_id(request.headers.get("X-Request-Id")) or fresh_id()}


def traceparent(headers: "CIMultiDictProxy[str]") -> str:
    """Return the trace that the client's request belongs to, as version 00 of W3C Trace Context writes it.

    Empty without a header, and for one that is malformed (§3.2.2: such a one is ignored).
    """
    given = headers.getall("traceparent", ())
    found = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None:
        return ""
    version, trace, parent, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(parent, 16):
        return ""
    return f"00-{trace}-{parent}-{flags}"


def unknown_fields(names: Sequence[str]) -> str:
    """Return the warning (RFC 9111 §5.5, as a header's value) that nobody obeys these fields of a body."""
    shown = [printable for name in names[:SHOWN_MAX] if (printable := _printable(name))]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f'299 - "not known here, and not obeyed: {", ".join(shown)}{more}"'


def _printable(name: str) -> str:
    return "".join(c for c in name[:NAME_MAX] if c.isascii() and c.isprintable() and c not in '"\\')


def own_id(given: str | None) -> str:
    """Return the client's own id for a request if it is usable, else nothing."""
    if given and len(given) <= REQUEST_ID_MAX and given.isascii() and given.isprintable():
        return given
    return ""


def fresh_id() -> str:
    """Return an id for a request whose client gave none."""
    return os.urandom(ID_BYTES).hex()
