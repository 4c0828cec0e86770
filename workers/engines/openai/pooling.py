"""Servers that compute vectors or scores, and no tokens: their probe, and their canaries.

A canary is a question with a known answer. Such a server's answer is a list of numbers, which is compared like the logprobs of a
generating server:

    numbers of the response ──▶ 32 numbers of about equal size ──▶ an answer with fixed tokens, and these numbers as its logprobs

So the fleet records goldens, calibrates the tolerance and convicts as for any other server.
"""

import contextlib
import json
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

from events.wire import Chunk, Logprob
from workers.engines.openai.stream_decoder import Fault, JsonObject

NUMBERS = 32  # of an answer; each has a fixed token
NUMBER_MAX = 4.0  # larger ones are cut off
# Distance between a number and the second-best token of its position. It is far above every tie margin.
LEAD = 8.0
_SEED = 1337
CANARIES: Mapping[str, Callable[[str, str], JsonObject]] = {
    "/v1/embeddings": lambda model, text: {"model": model, "input": text},
    "/pooling": lambda model, text: {"model": model, "input": text},
    "/classify": lambda model, text: {"model": model, "input": text},
    "/score": lambda model, text: {"model": model, "text_1": _half(text, 0), "text_2": _half(text, 1)},
    "/rerank": lambda model, text: {
        "model": model,
        "query": _half(text, 0),
        "documents": [_half(text, 1), text],
    },
}
"""For each path to which canaries are sent: the body of a request, from the model's name and a text."""


def _half(text: str, which: int) -> str:
    words = text.split()
    middle = max(1, len(words) // 2)
    return " ".join(words[middle:] if which and len(words) > 1 else words[:middle])


async def pooling_path(
    model: str, paths: Collection[str], post: Callable[[str, JsonObject], Awaitable[tuple[int, bytes]]]
) -> str:
    """Return the first of a server's paths that answers a canary's request; empty if none does.

    `post` sends a JSON body to a path, and returns the status and body of the answer.
    """
    for path, fields in CANARIES.items():
        if path in paths:
            status, body = await post(path, fields(model, "One, two, three, four"))
            with contextlib.suppress(Fault):
                if status == 200 and read_numbers(body):
                    return path
    return ""


def read_numbers(body: bytes) -> list[float]:
    """Return all numbers in the results of a response, in order, without indexes.

    Raise Fault if there is none, or if one is not finite.
    """
    try:
        said = json.loads(body)
    except ValueError:
        raise Fault("engine_error: the upstream sent what is not JSON") from None
    results = (said.get("data") or said.get("results")) if isinstance(said, dict) else None
    found = list(_numbers(results))
    if not found:
        raise Fault("engine_error: the upstream's answer has no numbers")
    if not all(map(math.isfinite, found)):
        raise Fault("non_finite: a number of the upstream's answer is not finite")
    return found


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            if name not in ("index", "usage", "num_classes"):
                yield from _numbers(one)
    elif value is None:  # JSON has no NaN; some servers write null
        yield math.nan


def projected(numbers: Sequence[float]) -> list[float]:
    """Return NUMBERS (32) numbers of about equal size that change with every number given.

    A long list is scaled to length 1 and projected with random signs, the same for every worker. Each result then has a mean
    square of 1 over all lists. Fewer than 32 numbers are repeated.
    """
    if len(numbers) < NUMBERS:
        return [numbers[place % len(numbers)] for place in range(NUMBERS)]
    norm = math.sqrt(sum(one * one for one in numbers)) or 1.0
    signs = random.Random(_SEED)
    out = []
    for _ in range(NUMBERS):
        bits = signs.getrandbits(len(numbers))
        out.append(sum(one if bits >> place & 1 else -one for place, one in enumerate(numbers)) / norm)
    return out


def as_answer(body: bytes, positions: int) -> list[Chunk]:
    """Return a response to a canary as an answer of at most `positions` tokens.

    Raise Fault if the response has no valid numbers.
    """
    values = [max(-NUMBER_MAX, min(NUMBER_MAX, one)) - NUMBER_MAX for one in projected(read_numbers(body))]
    tokens = list(range(1, min(positions, NUMBERS) + 1))
    logprobs = [
        Logprob(value, [(token, value), (0, value - LEAD)])
        for token, value in zip(tokens, values, strict=False)
    ]
    return [Chunk(0, tokens, "length", None, logprobs)]
