"""Translates a worker's refusal of a request into the client's error.

A worker, or the server behind it, could write anything into a refusal: another user's text, markup, or instructions.
So the text of a refusal is passed on only if it is one of Holdfast's own messages (`OURS`). Otherwise the client receives
a fixed sentence, which contains only field names and numbers from the worker's text. Status, `code` and `type` are
passed on only if their value is known.
"""

import re
from functools import cache

from controller.frontend.errors import ApiError
from controller.frontend.openai.request_models import ChatBody, CompletionBody
from events.refusal import RequestRefusal

FIELDS_MAX = 3  # fields named in one sentence
TYPES = frozenset(  # types that OpenAI, vLLM and SGLang use for client errors
    ("invalid_request_error", "BadRequestError", "UnprocessableEntityError", "BadRequest", "validation_error")
)
OURS = re.compile(  # messages of Holdfast's own engines and workers, which contain only numbers and field names
    r"the prompt is empty"
    r"|\d{1,12} tokens leave no room in a context of \d{1,12}"
    r"|(?:stop |logit_bias: |allowed_token_ids: |bad_words: )?token ids go from 0 to \d{1,12}"
    r"|this engine has no guided decoding"
    r"|this model's server takes text only, no token ids"
    r"|of a prompt of more than \d{1,12} tokens there are no logprobs"
    r"|the request takes \d{1,12} bytes, \d{1,12} are the most that a worker reads"
    r"|[a-z_]{1,40} is not supported: this model's server (?:does not constrain its answers by|does not obey) it"
    r"|this model's server does not serve /[a-z0-9_/]{1,60}"
    r"|(?:echo|prompt_logprobs) is not supported: this model's server gives no logprobs of a prompt"
)
CONTEXT = re.compile(r"(?:context length|context size|context window)\D{0,40}?(\d{1,9})\b")
# a field name in a sentence; single words are not matched, because they are also ordinary words
NAME = re.compile(r"[a-z]+(?:_[a-z]+)+")
STATUSES = (400, 404, 413, 415, 422)


def as_api_error(rejection: RequestRefusal) -> ApiError:
    """Convert a worker's refusal to the error for the client."""
    status = rejection.status if rejection.status in STATUSES else 400
    return ApiError(
        status,
        _sentence(rejection, status),
        code=rejection.code,
        param=_field(rejection.param),
        kind=rejection.type if rejection.type in TYPES else "",
    )


def _sentence(rejection: RequestRefusal, status: int) -> str:
    if OURS.fullmatch(rejection.message):
        return rejection.message
    if (found := CONTEXT.search(rejection.message)) is not None:
        return f"the model server refused the request: prompt and answer exceed its context of {int(found[1])} tokens"
    named = [_field(rejection.param), *NAME.findall(rejection.message)]
    fields = list(dict.fromkeys(name for name in named if name and name.partition(".")[0] in _fields()))
    about = f"it names {', '.join(fields[:FIELDS_MAX])}" if fields else "it names no field"
    return f"the model server refused the request (HTTP {status}; {about}). Its own text is not passed on"


def _field(param: str | None) -> str | None:
    """Return the request field that a refusal names, or None if no request has such a field."""
    name = re.split(r"[.\[]", param or "", maxsplit=1)[0]
    return name if name in _fields() else None


@cache
def _fields() -> frozenset[str]:
    return frozenset((*ChatBody.model_fields, *CompletionBody.model_fields))
