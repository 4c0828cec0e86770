"""The requests of one simulated rank: a sequence and its bounds, the waiting queue, the running batch, and its next tokens.

Each sequence of the batch gets one token in each pass, so tokens are not counted one by one: a sequence's length follows
from the pass in which it entered. A sequence that must be visited again (its answer ends, its block is full) is in a
calendar, by pass. Until the next entry all passes are alike.

The waiting queue is ordered by priority, oldest first; canaries and preempted requests go before.

Nearly always the next token is that of the hash and nothing else happens: that path is short, because it is taken a
million times a second.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from math import inf
from typing import Literal

import xxhash

from events import blocks
from events.errors import UsageError
from events.wire import Chunk, Generate, Logprob, Sampling
from workers.engines.simulated import language
from workers.engines.simulated.faults import SimulatedFaults
from workers.engines.simulated.kv_cache import EvictorKind
from workers.engines.simulated.language import EOS, EOS_BELOW, FIRST, SPAN, TOKEN_BYTES, VOCABULARY
from workers.engines.simulated.reasoning import Reasoning

Preemption = Literal["newest", "oldest"]
KV_BLOCK_BYTES = 4096
PROMPT_LOGPROBS_MAX = (
    4096  # tokens of a prompt whose logprobs are wanted: 20 µs each, which delay all requests
)
BEFORE = -inf  # all priorities
Output = list[tuple[int, Chunk]]


class BadShape(UsageError):
    """The simulated engine's bounds contradict one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The engine's bounds, of each DP rank, and how it keeps within them."""

    model: str = "sim"
    context_tokens: int = 16_384
    block_tokens: int = 16
    kv_blocks: int = 32_768
    batch_max: int = 256
    waiting_max: int = 1024
    prefill_tokens_max: int = 8192  # tokens of a pass: one for each request that decodes, the rest of prompts
    kv_block_bytes: int = KV_BLOCK_BYTES  # that a move carries of one TP rank's part of a block
    kv_token_s: float = 0.0  # that the KV of a token takes to come
    tp: int = 1  # ranks that compute one pass together
    watermark: float = 0.01  # the share of the blocks that no new request may take, while others run
    prefix_caching: bool = True
    chunked_prefill: bool = True  # over several passes; otherwise a long prompt has one of its own
    preemption: Preemption = "newest"  # what goes back to waiting when blocks run out
    evictor: EvictorKind = "lru"
    host_kv_blocks: int = 0  # a tier below the device
    disk_kv_blocks: int = 0  # a tier below that
    reasoning: Reasoning | None = None  # answers begin with a thought
    fatal: tuple[int, ...] = ()  # a prompt that has these tokens in a row ends the process

    def __post_init__(self) -> None:
        if self.kv_block_bytes < self.block_tokens:
            raise BadShape(
                f"kv_block_bytes = {self.kv_block_bytes}: a KV block of {self.block_tokens} tokens has a byte for each at least"
            )
        if self.context_tokens > self.kv_blocks * self.block_tokens:
            raise BadShape(
                f"a context of {self.context_tokens} tokens needs more than {self.kv_blocks} KV blocks "
                f"of {self.block_tokens} tokens"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise BadShape(f"a watermark is at least 0 and below 1, not {self.watermark:g}")


class SimulatedSequence:
    """What the scheduler knows of a request: how long it is, when that matters, and which KV blocks it holds.

    `start` is its length when it last came into the batch, or is now if it is not there; the batch knows how much it has
    said since. `names` are the names of its full blocks, as far as they are needed.
    """

    __slots__ = (
        "batch", "before", "blocks", "cached", "canary", "computed", "due", "end", "fresh", "key", "last", "named", "names",
        "priority", "prompt", "since", "start",
    )  # fmt: skip

    def __init__(
        self, key: int, prompt: int, end: int, *, length: int = 0, canary: bool = False, priority: int = 0
    ) -> None:
        self.key = key
        self.prompt = prompt  # tokens of the request, replayed ones included
        self.start = length or prompt
        self.end = end  # its length when its answer is complete
        self.canary = canary
        self.priority = priority  # of those that wait the least goes first
        self.since = self.due = 0
        self.last = False  # its answer ends when it is due
        self.batch: DecodeBatch | None = None
        self.named = False  # its full blocks have names, so that others can find them
        self.names: list[int] = []
        self.blocks: list[int] = []
        self.cached = 0  # prompt tokens found when it was admitted
        self.computed = 0  # of its tokens, while it is in its prefill
        self.fresh = True  # nothing said since it was admitted
        self.before: list[Logprob] = []  # of its prompt: they come with its first token

    @property
    def length(self) -> int:
        """Tokens so far, prompt and all."""
        batch = self.batch
        return self.start if batch is None else self.start + batch.passes - self.since

    @property
    def made(self) -> int:
        """Tokens said for this request, here or where it was before its KV cache came."""
        return self.length - self.prompt

    def forget(self, renamed: Mapping[int, int]) -> None:
        """Continue with blocks that no other request can find."""
        self.named = False
        self.blocks = [renamed.get(block, block) for block in self.blocks]

    def name_blocks(self, block_tokens: int) -> list[int]:
        """Return the names of all its full blocks. It is not in the batch."""
        raise NotImplementedError

    def name_next(self, block_tokens: int) -> int:
        """Name the block that has just become full and return its name: one token after it has been said."""
        raise NotImplementedError


class Silent(SimulatedSequence):
    """A request whose tokens are only counted. `names` may go on into the answer; what they do not name
    gets a name that no other request has."""

    __slots__ = ("_given", "_salt")

    def __init__(
        self, key: int, prompt: int, answer: int, names: Sequence[int], *, canary: bool = False
    ) -> None:
        super().__init__(key, prompt, prompt + answer, canary=canary)
        self._given = names
        self._salt = xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"))

    def name_blocks(self, block_tokens: int) -> list[int]:
        full = self.start // block_tokens
        if not self.names:
            self.names = list(self._given[:full])
        while len(self.names) < full:
            self.name_next(block_tokens)
        return self.names

    def name_next(self, block_tokens: int) -> int:
        names, name = self.names, self._salt
        if len(names) < len(self._given):
            name = self._given[len(names)]
        elif names:
            name = blocks.follow(names[-1], self._salt)
        names.append(name)
        return name


class Spoken(SimulatedSequence):
    """A request whose tokens are chosen.

    `tokens` are those that it came with, also where they come after the request's because its KV cache came along. `unusual`
    are the tokens said here that are not their position's plain one; `marks` those that begin and end its thought, which goes
    to the position `thought`; `tail` are the tokens since its last named block, as bytes. It is `quick` while the next token
    needs nothing but the hash, and nothing else happens with it.
    """

    __slots__ = (
        "banned", "counts", "digest", "ends", "ends_below", "full", "hash", "marks", "note", "plain", "quick", "request",
        "salt", "seed", "tail", "thought", "tokens", "unusual", "update",
    )  # fmt: skip

    def __init__(
        self, key: int, request: Generate, shape: EngineShape, came: list[int] | None = None
    ) -> None:
        """`came`: all tokens of a request that has come with its KV cache."""
        sampling, prompt = request.sampling, len(request.tokens)
        self.tokens = tokens = request.tokens if came is None else came
        end = min(prompt + sampling.max_tokens, shape.context_tokens)
        super().__init__(
            key, prompt, end, length=len(tokens), canary=request.canary, priority=request.priority
        )
        self.request = request
        self.listen(language.open_sequence(shape.model, tokens))
        # A KV cache that has come lacks that of the last token, so that a block which it fills is not full yet.
        self.full = (len(tokens) - (came is not None)) // shape.block_tokens  # blocks that it came with
        self.tail = [TOKEN_BYTES[token] for token in tokens[self.full * shape.block_tokens :]]
        self.note = self.tail.append
        self.unusual: dict[int, int] = {}  # by position
        self.ends = frozenset({*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))})
        self.ends_below = 0 if sampling.ignore_eos else EOS_BELOW  # digests under this may mean the end
        self.banned = frozenset({*sampling.stop_token_ids, EOS})
        self.thought, self.marks = _thought(request.prompt_tokens, end, shape.reasoning)
        self.plain = _is_plain(sampling)
        self.quick = False
        self.salt = blocks.seed(namespace=request.cache_salt)
        self.seed = _seed(request)
        self.counts = _counts(tokens[request.prompt_tokens :]) if penalises(sampling) else {}

    def listen(self, running: xxhash.xxh3_64) -> None:
        """Let this hash say what comes next: it has gone over all tokens."""
        self.hash, self.digest, self.update = running, running.intdigest, running.update

    def name_prefix(self, block_tokens: int) -> list[int]:
        """Return the names of the full blocks that it came with."""
        if not self.names and self.full:
            self.names = prefix_names(self.tokens[: self.full * block_tokens], self.request, block_tokens)
        return self.names

    def name_blocks(self, block_tokens: int) -> list[int]:
        self.name_prefix(block_tokens)
        while len(self.tail) >= block_tokens:
            self.name_next(block_tokens)
        return self.names

    def name_next(self, block_tokens: int) -> int:
        own = blocks.local_hash(b"".join(self.tail[:block_tokens]), self.salt)
        del self.tail[:block_tokens]
        name = blocks.follow(self.names[-1], own) if self.names else own
        self.names.append(name)
        return name


def refusal(request: Generate, shape: EngineShape) -> str | None:
    """Say why a request can never be served, if so."""
    tokens = request.tokens
    if not tokens:
        return "invalid_request: the prompt is empty"
    if against := too_large(len(tokens), shape):
        return against
    if min(tokens) < 0 or max(tokens) >= VOCABULARY:
        return f"invalid_request: token ids go from 0 to {VOCABULARY - 1}"
    if request.sampling.prompt_logprobs is not None and len(tokens) > PROMPT_LOGPROBS_MAX:
        return f"invalid_request: of a prompt of more than {PROMPT_LOGPROBS_MAX} tokens there are no logprobs"
    bias = request.sampling.logit_bias
    if bias and not 0 <= min(bias) <= max(bias) < VOCABULARY:
        return f"invalid_request: logit_bias: token ids go from 0 to {VOCABULARY - 1}"
    return None


def too_large(prompt: int, shape: EngineShape) -> str | None:
    """Say why a prompt of so many tokens can never be served, if so. A context fits into the pool."""
    if prompt < shape.context_tokens:
        return None
    return f"invalid_request: {prompt} tokens leave no room in a context of {shape.context_tokens}"


def prefix_names(tokens: Sequence[int], request: Generate, block_tokens: int) -> list[int]:
    """Return the names of the full blocks of these tokens of a request."""
    own = blocks.local_hashes(tokens, block_tokens, blocks.seed(namespace=request.cache_salt))
    return blocks.sequence_hashes(own)


def _is_plain(sampling: Sampling) -> bool:
    """Whether the next token needs nothing but the hash."""
    return (
        sampling.temperature <= 0
        and not sampling.logprobs
        and not sampling.stop_token_ids
        and not sampling.logit_bias
        and not penalises(sampling)
    )


def penalises(sampling: Sampling) -> bool:
    """Whether earlier tokens change the choice of the next one."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty) or sampling.repetition_penalty != 1.0


def _thought(first: int, end: int, reasoning: Reasoning | None) -> tuple[int, dict[int, int]]:
    """Return where the thought of an answer from `first` to `end` is over, and the tokens that mark it."""
    if reasoning is None or not (count := reasoning.tokens(end - first)):
        return 0, {}
    marks = {first: reasoning.start_thinking_token_id, first + count - 1: reasoning.end_thinking_token_id}
    return first + count, marks


def _counts(generated: list[int]) -> dict[int, int]:
    """Count the tokens that penalties look at: those generated so far, replayed ones included."""
    counts: dict[int, int] = {}
    for token in generated:
        counts[token] = counts.get(token, 0) + 1
    return counts


def _seed(request: Generate) -> int:
    """Return the request's seed; without one its id serves, which stays the same wherever the request goes."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return xxhash.xxh64_intdigest(request.request.encode())


class DecodeBatch:
    """The sequences that decode, in the order in which they came."""

    def __init__(self, block_tokens: int) -> None:
        self.passes = 0  # that have ended
        self._block_tokens = block_tokens
        self.sequences: dict[int, SimulatedSequence] = {}
        self._calendar: dict[int, list[SimulatedSequence]] = {}
        self._next: list[int] = []  # a heap of the calendar's passes
        self._offset = 0  # the sum of their lengths is this and one for each of them and pass

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> int:
        """How many tokens all of them have, prompts and all."""
        return self._offset + self.passes * len(self.sequences)

    def lengths(self) -> list[int]:
        """Return how many tokens each of them has."""
        return [one.length for one in self.sequences.values()]

    def enter(self, sequence: SimulatedSequence) -> None:
        """Let a sequence say a token in each pass from now on."""
        sequence.since, sequence.batch = self.passes, self
        self.sequences[sequence.key] = sequence
        self._offset += sequence.start - self.passes
        self.look(sequence)

    def look(self, sequence: SimulatedSequence) -> None:
        """Have a sequence looked at when its answer ends or it needs another block."""
        size, length = self._block_tokens, sequence.start + self.passes - sequence.since
        left, room = sequence.end - length, size - (length - 1) % size
        sequence.last = left <= room
        due = sequence.due = self.passes + (left if left <= room else room)
        found = self._calendar.get(due)
        if found is None:
            self._calendar[due] = [sequence]
            heappush(self._next, due)
        else:
            found.append(sequence)

    def leave(self, key: int) -> SimulatedSequence:
        """Take a sequence out."""
        sequence = self.sequences.pop(key)
        self._offset -= sequence.start - sequence.since
        sequence.start += self.passes - sequence.since
        sequence.batch = None
        waited_for = self._calendar.get(sequence.due)
        if waited_for and sequence in waited_for:
            waited_for.remove(sequence)
        return sequence

    def due(self) -> list[SimulatedSequence]:
        """Return the sequences that the present pass makes due, in the order in which they were entered into the calendar."""
        if self.passes + 1 not in self._calendar:
            return []
        heappop(self._next)
        return self._calendar.pop(self.passes + 1)

    def ahead(self) -> int:
        """Return how many passes will end before a sequence is due; 0 if none decodes."""
        while self._next:
            if self._calendar[self._next[0]]:
                return self._next[0] - self.passes - 1
            del self._calendar[heappop(self._next)]
        return 0


class WaitingQueue:
    """The requests of one rank that are not admitted, or no longer."""

    def __init__(self) -> None:
        self._lines: dict[float, OrderedDict[int, SimulatedSequence]] = {
            BEFORE: OrderedDict()
        }  # by priority, the least first
        self._of: dict[int, OrderedDict[int, SimulatedSequence]] = {}  # by key

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: int) -> bool:
        return key in self._of

    def __iter__(self) -> Iterator[int]:
        """Go through their keys, the next one first."""
        return chain.from_iterable(self._lines.values())

    @property
    def first(self) -> SimulatedSequence:
        """The next one. The queue is not empty."""
        return next(line[next(iter(line))] for line in self._lines.values() if line)

    def add(self, sequence: SimulatedSequence) -> None:
        """Take a new request in."""
        if sequence.canary:  # what finds a sick worker must not wait for a hundred others
            self.put_back(sequence)
            return
        line = self._lines.get(sequence.priority)
        if line is None:
            line = self._lines[sequence.priority] = OrderedDict()
            self._lines = dict(sorted(self._lines.items()))
        line[sequence.key] = sequence
        self._of[sequence.key] = line

    def put_back(self, sequence: SimulatedSequence) -> None:
        """Take one in again that was preempted: it is next."""
        line = self._of[sequence.key] = self._lines[BEFORE]
        line[sequence.key] = sequence
        line.move_to_end(sequence.key, last=False)

    def remove(self, key: int) -> None:
        """Take one out. Unknown keys are ignored."""
        if (line := self._of.pop(key, None)) is not None:
            del line[key]

    def clear(self) -> None:
        """Forget all of them."""
        self._lines = {BEFORE: OrderedDict()}
        self._of.clear()

    def lengths(self) -> tuple[list[int], list[int]]:
        """Return the lengths in tokens of those that have said nothing yet, and of the preempted ones."""
        lengths: tuple[list[int], list[int]] = [], []
        for one in chain.from_iterable(line.values() for line in self._lines.values()):
            lengths[one.made > 0].append(one.length)
        return lengths


def next_pass(
    sequences: Mapping[int, Spoken], passes: int, faults: SimulatedFaults
) -> tuple[Output, list[Spoken]]:
    """Give one token to each, in the pass that makes so many; return what each gets, and the sequences whose answer has ended
    before its length. One without output yet, or which reaches its length with this pass, is not quick."""
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
        chunk = _next_chunk(sequence, digest, faults, healthy)
        if sequence.last and sequence.due == passes:
            chunk.finish = chunk.finish or "length"
        elif chunk.finish is not None:
            stopped.append(sequence)
        out.append((key, chunk))
    return out, stopped


def next_passes(sequences: Sequence[Spoken], passes: int) -> list[list[int]]:
    """Give so many tokens to each, or as many as there are before a pass that might end an answer; return what each has said.
    All of them are quick, and the engine is healthy.

    One sequence after the other, each on a copy of its hash: the pass at which they stop is known when all are done.
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


def _next_chunk(sequence: Spoken, digest: int, faults: SimulatedFaults, healthy: bool) -> Chunk:
    """Let a sequence say its next token, and whether that ends the answer."""
    place = sequence.length
    cached = sequence.cached if sequence.fresh and not sequence.made else None
    sequence.fresh = False
    if healthy and sequence.plain and digest >= sequence.ends_below and place not in sequence.marks:
        token = FIRST + digest % SPAN
        chunk = Chunk(0, [token], cached_tokens=cached)
    else:
        chunk = _sampled(sequence, digest, faults)
        chunk.cached_tokens = cached
        token = chunk.tokens[0]
    if sequence.before:
        chunk.logprobs, sequence.before = [*sequence.before, *(chunk.logprobs or ())], []
    piece = TOKEN_BYTES[token]
    sequence.update(piece)
    sequence.note(piece)
    sequence.quick = sequence.plain and place + 1 >= sequence.thought
    return chunk


def _sampled(sequence: Spoken, digest: int, faults: SimulatedFaults) -> Chunk:
    """Choose a token with everything considered: sampling, penalties, stops, logprobs, thoughts, faults."""
    sampling, place = sequence.request.sampling, sequence.length
    early = sequence.made < sampling.min_tokens or place < sequence.thought
    ranked = language.candidates(digest, eos=not early and not sampling.ignore_eos)
    luck = language.luck_at(sequence.seed, digest) if sampling.temperature > 0 else 0.0
    bias = sampling.logit_bias
    open_to = language.with_biased(ranked, digest, bias) if bias else ranked
    token = language.choose(open_to, sampling, sequence.counts, sequence.banned if early else (), luck)
    if token >= FIRST and faults.sampler:
        token = faults.drawn(token, sampling.temperature)
    token = sequence.marks.get(place, token)
    if token >= FIRST and faults.corrupt_one_in:
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
