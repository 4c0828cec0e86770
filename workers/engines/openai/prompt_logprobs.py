"""Reads the logprobs of a prompt's tokens from the server (vLLM's `prompt_logprobs`).

vLLM does not stream them. They come from a separate request before the answer, which leaves the prompt in its cache.
"""

import math
from collections.abc import Sequence

import msgspec

from events.refusal import unsupported
from events.wire import Chunk, Generate, Logprob
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.stream_decoder import Fault
from workers.engines.openai.upstream import Upstream, refused

BYTES_MAX = 32 * 1024 * 1024  # a logprob takes about 80 bytes, and a prompt has at most 100,000 tokens


class RankedToken(msgspec.Struct):
    """One token of one position, as vLLM describes it."""

    logprob: float | None = None


class EchoedChoice(msgspec.Struct):
    """A choice of a completion response. Only the field used here is decoded."""

    prompt_logprobs: list[dict[str, RankedToken] | None] | None = None


class EchoedAnswer(msgspec.Struct):
    """A completion response. Only the field used here is decoded."""

    choices: list[EchoedChoice]


async def prompt_logprobs(upstream: Upstream, abilities: Abilities, request: Generate) -> list[Logprob]:
    """Return the logprobs of a request's prompt, if it asks for them. Raise Fault, or UpstreamUnavailable."""
    top = request.sampling.prompt_logprobs
    if top is None:
        return []
    sampling = msgspec.structs.replace(request.sampling, max_tokens=1, min_tokens=0, logprobs=0)
    asked = msgspec.structs.replace(request, sampling=sampling)
    status, body = await upstream.ask(abilities, asked, {"prompt_logprobs": top}, BYTES_MAX)
    if status >= 400:
        raise Fault(refused(body, status))
    return read_prompt_logprobs(body, request.tokens, top)


def read_prompt_logprobs(answer: bytes, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Return the logprob of each token of a prompt, with the `top` best at its position. Raise Fault.

    The logprob of the first token has no meaning.
    """
    try:
        found = msgspec.json.decode(answer, type=EchoedAnswer).choices[0].prompt_logprobs
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise Fault(f"engine_error: the upstream's logprobs of a prompt cannot be read: {error}") from None
    if found is None:
        raise Fault(unsupported("echo", "this model's server gives no logprobs of a prompt").error)
    if len(found) != len(tokens):
        raise Fault(f"engine_error: of {len(tokens)} tokens the upstream gives the logprobs of {len(found)}")
    later = zip(tokens[1:], found[1:], strict=True)
    return [Logprob(0.0), *(_position(token, ranked or {}, top) for token, ranked in later)]


def _position(token: int, ranked: dict[str, RankedToken], top: int) -> Logprob:
    values = {int(name): _finite(one.logprob) for name, one in ranked.items() if name.isdigit()}
    if token not in values:
        raise Fault("engine_error: the upstream does not say how likely a token of the prompt is")
    return Logprob(values[token], sorted(values.items(), key=lambda pair: -pair[1])[:top])


def _finite(value: float | None) -> float:
    if value is None or not math.isfinite(value):
        raise Fault(f"non_finite: a logprob is {value}")
    return value


def put_before(chunks: list[Chunk], found: list[Logprob]) -> list[Chunk]:
    """Prepend the prompt's logprobs, `found`, to those of the first chunk with tokens. Return the chunks.

    `found` is cleared after that.
    """
    if not found:
        return chunks
    first = next((chunk for chunk in chunks if chunk.tokens), None)
    if first is not None:
        first.logprobs = [*found, *(first.logprobs or ())]
        found.clear()
    return chunks
