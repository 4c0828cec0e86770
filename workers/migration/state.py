"""The state of a request that a move transfers besides tokens and KV cache, as a check for the target.

The first design document lists a request's state. Of that, token ids travel separately (`Ending.tokens`), and blocks arrive in
the order of the sequence instead of with block ids. The target does not need this state to continue: the frontend has sent it
the request, and random numbers are keyed by (seed, position). The state
shows that both sides mean the same request.
"""

from collections.abc import Sequence

import msgspec

from events.wire import Sampling
from workers.frontends import RequestOrigin
from workers.kv_transfer.messages import STATE_BYTES_MAX


class SamplingState(msgspec.Struct, array_like=True, frozen=True):
    """How tokens are sampled. No random state is kept: random numbers follow from the seed and the position."""

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
    """When a request ends."""

    max_tokens: int  # of the whole answer
    ignore_eos: bool
    stop_token_ids: list[int]


class RequestMigrationState(msgspec.Struct, array_like=True, frozen=True):
    """A request in the middle of its answer, as its source hands it over."""

    request_id: str
    prompt_tokens: int
    generated_tokens: int
    num_computed_tokens: int
    sampling_state: SamplingState
    stop_criteria: StopCriteria
    sequence_position: int  # of the next token to sample
    stopped_ms: float = 0.0  # time since it stopped at the source
    link: str = ""  # how its blocks travelled: shm, socket, or a transport's name


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestMigrationState)


def sampling_state(s: Sampling) -> SamplingState:
    """Return the part of the sampling parameters that determines a request's tokens."""
    penalties = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
    return SamplingState(
        s.seed, s.temperature, s.top_p, s.top_k, *penalties, s.logprobs, s.min_p, s.logit_bias
    )


def stop_criteria(origin: RequestOrigin) -> StopCriteria:
    """Return a request's stop criteria, counted from its first token: each replay arrives with a smaller `max_tokens`."""
    s = origin.sampling
    return StopCriteria(s.max_tokens + origin.replayed, s.ignore_eos, sorted(s.stop_token_ids))


def packed_state(origin: RequestOrigin, tokens: int, computed: int, stopped_ms: float, link: str) -> bytes:
    """Encode the state of a request that now has this many tokens."""
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
    """Decode a state that arrived. Raise ValueError if it is invalid."""
    if len(data) > STATE_BYTES_MAX:
        raise ValueError(f"the state has {len(data)} bytes, more than {STATE_BYTES_MAX}")
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"cannot decode the state: {error}") from error


def difference(
    state: RequestMigrationState, origin: RequestOrigin, tokens: Sequence[int], computed: int
) -> str:
    """Describe how the request that arrived differs from the reserved one; empty if it does not."""
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
