"""What of a request travels besides its tokens and its KV cache, for the target to compare with what it was asked for.

Of the first document's state of a request, token ids travel beside it (`Ending.tokens`), and instead of block ids the
blocks come in the order of the sequence. The target needs none of it to go on: the frontend has told it the request, and
random numbers are keyed by (seed, position). It shows that both mean the same.
"""

from collections.abc import Sequence

import msgspec

from events.wire import Sampling
from workers.frontends import RequestOrigin
from workers.kv_transfer.messages import STATE_BYTES_MAX


class SamplingState(msgspec.Struct, array_like=True, frozen=True):
    """How its tokens are chosen. Of random numbers nothing is kept: they follow from the seed and the position."""

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
    """When it ends."""

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
    stopped_ms: float = 0.0  # since it stopped at the source
    link: str = ""  # over what its blocks went: shm, socket, or a transport's name


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestMigrationState)


def sampling_state(s: Sampling) -> SamplingState:
    """Return what a request's tokens are chosen by."""
    penalties = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
    return SamplingState(
        s.seed, s.temperature, s.top_p, s.top_k, *penalties, s.logprobs, s.min_p, s.logit_bias
    )


def stop_criteria(asked: RequestOrigin) -> StopCriteria:
    """Return when a request ends, reckoned from its first token: each replay brings a lower limit of its own."""
    s = asked.sampling
    return StopCriteria(s.max_tokens + asked.replayed, s.ignore_eos, sorted(s.stop_token_ids))


def packed_state(asked: RequestOrigin, tokens: int, computed: int, stopped_ms: float, link: str) -> bytes:
    """Return the state of a request that has so many tokens now."""
    return _encoder.encode(
        RequestMigrationState(
            asked.request,
            asked.prompt_tokens,
            tokens - asked.prompt_tokens,
            computed,
            sampling_state(asked.sampling),
            stop_criteria(asked),
            tokens,
            stopped_ms,
            link,
        )
    )


def unpacked_state(data: bytes) -> RequestMigrationState:
    """Return a state that arrived. Raise ValueError if it is none."""
    if len(data) > STATE_BYTES_MAX:
        raise ValueError(f"the state has {len(data)} bytes, more than {STATE_BYTES_MAX}")
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the state is none: {error}") from error


def difference(
    state: RequestMigrationState, asked: RequestOrigin, tokens: Sequence[int], computed: int
) -> str:
    """Say in what the request that arrived is not the one that was reserved for; empty: it is."""
    pairs = (
        ("request_id", state.request_id, asked.request),
        ("prompt_tokens", state.prompt_tokens, asked.prompt_tokens),
        ("sequence_position", state.sequence_position, len(tokens)),
        ("num_computed_tokens", state.num_computed_tokens, computed),
        ("sampling_state", state.sampling_state, sampling_state(asked.sampling)),
        ("stop_criteria", state.stop_criteria, stop_criteria(asked)),
    )
    for name, theirs, ours in pairs:
        if theirs != ours:
            return f"{name} is {theirs!r} there and {ours!r} here"
    return ""
