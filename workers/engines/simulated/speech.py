"""What do the sequences of a batch say in one pass?

Nearly always the next token is that of the hash and nothing else happens: that path is short, because it is taken a
million times a second.
"""

from collections.abc import Mapping, Sequence

from events.wire import Chunk, Logprob
from workers.engines.simulated import language
from workers.engines.simulated.faults import SimulatedFaults
from workers.engines.simulated.language import FIRST, SPAN, TOKEN_BYTES
from workers.engines.simulated.sequence import Spoken, penalises

Output = list[tuple[int, Chunk]]


def speak(
    sequences: Mapping[int, Spoken], passes: int, faults: SimulatedFaults
) -> tuple[Output, list[Spoken]]:
    """Give one token to each, in the pass that makes so many; return what each gets, and whose answer has ended before its
    length. Whoever has said nothing yet, or reaches its length with this pass, is not quick."""
    out: Output = []
    stopped: list[Spoken] = []
    healthy = faults.healthy
    for key, sequence in sequences.items():
        digest = sequence.digest()
        if sequence.quick and digest >= sequence.ends_below and healthy:
            token = FIRST + digest % SPAN
            piece = TOKEN_BYTES[token]
            sequence.update(piece)
            sequence.note(piece)
            out.append((key, Chunk(0, [token])))
            continue
        chunk = _say(sequence, digest, faults, healthy)
        if sequence.last and sequence.due == passes:
            chunk.finish = chunk.finish or "length"
        elif chunk.finish is not None:
            stopped.append(sequence)
        out.append((key, chunk))
    return out, stopped


def speak_on(sequences: Sequence[Spoken], passes: int) -> list[list[int]]:
    """Give so many tokens to each, or as many as there are before a pass that might end an answer; return what each has said.
    All of them are quick, and the engine is healthy.

    One sequence after the other, each on a copy of its hash: the pass at which they stop is known when all have spoken.
    """
    said = []
    for sequence in sequences:
        running, tokens = sequence.hash.copy(), []
        digest, update, ends_below = running.intdigest, running.update, sequence.ends_below
        for _ in range(passes):
            place = digest()
            if place < ends_below:
                break
            token = FIRST + place % SPAN
            update(TOKEN_BYTES[token])
            tokens.append(token)
        passes = len(tokens)
        said.append((running, tokens))
    for sequence, (running, tokens) in zip(sequences, said, strict=True):
        if len(tokens) > passes:
            del tokens[passes:]
            running = sequence.hash
            running.update(language.as_bytes(tokens))
        sequence.listen(running)
        sequence.tail += [TOKEN_BYTES[token] for token in tokens]
    return [tokens for _, tokens in said]


def _say(sequence: Spoken, digest: int, faults: SimulatedFaults, healthy: bool) -> Chunk:
    """Let a sequence say its next token, and whether that ends the answer."""
    place = sequence.length
    cached = sequence.cached if sequence.fresh and not sequence.made else None
    sequence.fresh = False
    if healthy and sequence.plain and digest >= sequence.ends_below and place not in sequence.marks:
        token = FIRST + digest % SPAN
        chunk = Chunk(0, [token], cached_tokens=cached)
    else:
        chunk = _choose(sequence, digest, faults)
        chunk.cached_tokens = cached
        token = chunk.tokens[0]
    if sequence.before:
        chunk.logprobs, sequence.before = [*sequence.before, *(chunk.logprobs or ())], []
    piece = TOKEN_BYTES[token]
    sequence.update(piece)
    sequence.note(piece)
    sequence.quick = sequence.plain and place + 1 >= sequence.thought
    return chunk


def _choose(sequence: Spoken, digest: int, faults: SimulatedFaults) -> Chunk:
    """Choose a token with everything considered: sampling, penalties, stops, logprobs, thoughts, faults."""
    sampling, place = sequence.request.sampling, sequence.length
    early = sequence.made < sampling.min_tokens or place < sequence.thought
    ranked = language.candidates(digest, eos=not early and not sampling.ignore_eos)
    luck = language.luck_at(sequence.seed, digest) if sampling.temperature > 0 else 0.0
    bias = sampling.logit_bias
    open_to = language.with_biased(ranked, digest, bias) if bias else ranked
    token = language.choose(open_to, sampling, sequence.counts, sequence.banned if early else (), luck)
    if token >= FIRST:
        token = faults.drawn(token, sampling.temperature)
    token = sequence.marks.get(place, token)
    if token >= FIRST:
        token = faults.altered(token)
    if token != language.plain_token(digest):
        sequence.unusual[place] = token
    if penalises(sampling):
        sequence.counts[token] = sequence.counts.get(token, 0) + 1
    logprobs: list[Logprob] | None = None
    if sampling.logprobs:
        logprobs = [language.logprobs(ranked, token, sampling.logprobs, faults.drift)]
    finish = "stop" if not early and token in sequence.ends else None
    return Chunk(0, [token], finish, None, logprobs)
