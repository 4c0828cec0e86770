"""Encodes and checks the state of a request that moves with its KV cache to another worker.

The state contains no token ids, because they are sent separately (`Ending.tokens`). It contains no block ids, because blocks
arrive in the order of the sequence. The target does not need this state to continue the request: it has the request from the
frontend, and random numbers depend only on the seed and the position. The target compares the state with the request of its
reservation, so that a wrong request is detected.
"""

from collections.abc import Sequence

import msgspec

from events.wire import Sampling
from workers.frontends import RequestOrigin
from workers.kv_transfer.messages import STATE_BYTES_MAX


class SamplingState(msgspec.Struct, array_like=True, frozen=True):
    """The sampling parameters of a request.

    There is no state of a random generator, because random numbers depend only on the seed and the token's position.
    """

    seed: int | None
    temperature: float
    top_p: float
    top_k: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int
    min_p: float = 0.0
    logit_bias: dict[int, float] = {}


class StopCriteria(msgspec.Struct, array_like=True, frozen=True):
    """The conditions under which a request's answer ends."""

    max_tokens: int  # maximum length of the whole answer
    ignore_eos: bool
    stop_token_ids: list[int]


class RequestMigrationState(msgspec.Struct, array_like=True, frozen=True):
    """The state of a request with a part of its answer, as the source sends it to the target."""

    request_id: str
    prompt_tokens: int
    generated_tokens: int
    num_computed_tokens: int  # tokens that have their KV in the shipped blocks
    sampling_state: SamplingState
    stop_criteria: StopCriteria
    sequence_position: int  # position of the next token to sample
    stopped_ms: float = 0.0  # time since the source stopped the request
    link: str = ""  # the link that carried the blocks: shm, socket, or a transport's name


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestMigrationState)


def sampling_state(s: Sampling) -> SamplingState:
    """Return the sampling parameters that determine a request's tokens."""
    penalties = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
    return SamplingState(
        s.seed, s.temperature, s.top_p, s.top_k, *penalties, s.logprobs, s.min_p, s.logit_bias
    )


def stop_criteria(origin: RequestOrigin) -> StopCriteria:
    """Return a request's stop criteria, for its whole answer.

    A request may already contain a part of its answer when it arrives (a replay). Its `max_tokens` then covers only the rest of
    the answer, so the number of the replayed tokens is added.
    """
    s = origin.sampling
    return StopCriteria(s.max_tokens + origin.replayed, s.ignore_eos, sorted(s.stop_token_ids))


def packed_state(origin: RequestOrigin, tokens: int, computed: int, stopped_ms: float, link: str) -> bytes:
    """Encode the state of a request that has `tokens` tokens, including the prompt.

    The shipped blocks hold the KV of the first `computed` tokens. `stopped_ms` is the time since the source stopped the request.
    `link` is the link that carried the blocks.
    """
    return _encoder.encode(
        RequestMigrationState(
            origin.request,
            origin.prompt_tokens,
            tokens - origin.prompt_tokens,
            computed,
            sampling_state(origin.sampling),
            stop_criteria(origin),
            tokens,
            stopped_ms,
            link,
        )
    )


def unpacked_state(data: bytes) -> RequestMigrationState:
    """Decode a state that `packed_state` has encoded. Raise ValueError if `data` is invalid or too long."""
    if len(data) > STATE_BYTES_MAX:
        raise ValueError(f"the state has {len(data)} bytes, more than {STATE_BYTES_MAX}")
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"cannot decode the state: {error}") from error


def difference(
    state: RequestMigrationState, origin: RequestOrigin, tokens: Sequence[int], computed: int
) -> str:
    """Compare an arrived state with the reserved request `origin` and the arrived tokens.

    Return a text with the first difference; empty if there is none.
    """
    pairs = (
        ("request_id", state.request_id, origin.request),
        ("prompt_tokens", state.prompt_tokens, origin.prompt_tokens),
        ("sequence_position", state.sequence_position, len(tokens)),
        ("num_computed_tokens", state.num_computed_tokens, computed),
        ("sampling_state", state.sampling_state, sampling_state(origin.sampling)),
        ("stop_criteria", state.stop_criteria, stop_criteria(origin)),
    )
    for name, theirs, ours in pairs:
        if theirs != ours:
            return f"{name} is {theirs!r} there and {ours!r} here"
    return ""
