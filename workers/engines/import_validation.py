"""Validates a request that has arrived with its KV cache. The same checks for every engine."""

from collections.abc import Sequence

from events.wire import Generate


def validate_import(
    request: Generate,
    room_tokens: int,
    tokens: Sequence[int],
    computed: int,
    *,
    context: int,
    vocabulary: int,
) -> str:
    """Return why these tokens do not continue the request for which room was reserved; empty if they do.

    The KV of the first `computed` tokens has arrived.
    """
    length, submitted = len(tokens), len(request.tokens)
    if list(tokens[:submitted]) != request.tokens:
        return "the tokens do not continue those of the reservation"
    if length > room_tokens:
        return f"{length} tokens arrived, but room was reserved for {room_tokens}"
    if any(not 0 <= token < vocabulary for token in tokens[submitted:]):
        return f"token ids go from 0 to {vocabulary - 1}"
    if not 0 < computed <= length:
        return f"the KV of {computed} of {length} tokens was announced"
    if length >= min(submitted + request.sampling.max_tokens, context):
        return "the request was already complete on arrival"
    return ""
