"""The requests of one simulated rank: waiting queue, running batch, and generation of tokens.

Each sequence of the batch gets one token in each forward pass. So tokens need not be counted one by one: a sequence's length
follows from the number of passes since it entered the batch. The calendar lists, for each coming pass, the sequences that end or
need another block in that pass. No sequence ends or needs a block in the passes before the calendar's next entry.

The waiting queue is ordered by priority, and by arrival within a priority. Canaries and preempted requests go first.

In most passes, a sequence's next token follows from the hash of its tokens alone. The code for this case is short, because it
runs a million times per second.
"""

from collections import Counter, OrderedDict
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
from workers.engines.constrained import GrammarFollower
from workers.engines.engine import lacks_adapter, seed_of, validate_request
from workers.engines.faults import EngineFaults
from workers.engines.simulated import language
from workers.engines.simulated.kv_cache import EvictorKind
from workers.engines.simulated.language import EOS, EOS_BELOW, FIRST, SPAN, TOKEN_BYTES, VOCABULARY, Reasoning
from workers.engines.simulated.tool_calls import call_constraint
from workers.engines.token_limits import completing

Preemption = Literal["newest", "oldest"]
KV_BLOCK_BYTES = 4096
PROMPT_LOGPROBS_MAX = 4096  # longest prompt with logprobs; each token takes 20 µs, which delays all requests
BEFORE = -inf  # sorts before all priorities
Output = list[tuple[int, Chunk]]


class BadShape(UsageError):
    """The limits of a simulated engine are invalid, or contradict one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The limits of a simulated engine per DP rank, and its scheduling and eviction policies."""

    model: str = "sim"
    context_tokens: int = 16_384
    block_tokens: int = 16
    kv_blocks: int = 32_768
    batch_max: int = 256
    waiting_max: int = 1024
    # tokens per pass; each decoding request takes one, and prompts get the rest
    prefill_tokens_max: int = 8192
    kv_block_bytes: int = KV_BLOCK_BYTES  # bytes that a move transfers for one TP rank's part of a block
    kv_token_s: float = 0.0  # seconds to transfer the KV of a token
    tp: int = 1  # number of TP ranks, which compute each pass together
    watermark: float = 0.01  # share of the blocks that new requests may not use while others run
    prefix_caching: bool = True
    # a long prompt is split over several passes; False: it is computed in one pass
    chunked_prefill: bool = True
    preemption: Preemption = "newest"  # which request is preempted when blocks run out
    evictor: EvictorKind = "lru"
    host_kv_blocks: int = 0  # blocks in the host memory tier, into which the device evicts; 0: no such tier
    disk_kv_blocks: int = 0  # blocks in the disk tier, into which the host tier evicts; 0: no such tier
    reasoning: Reasoning | None = None  # each answer begins with reasoning; None: without
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters; each changes the tokens of answers
    fatal: tuple[int, ...] = ()  # a prompt that contains these tokens in a row ends the process

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

    def weights(self, adapter: str) -> str:
        """Return the name of the weights that determine an answer's tokens: those of the model and of an adapter."""
        return f"{self.model}\0{adapter}" if adapter else self.model


class SimulatedSequence:
    """The scheduling state of one request: its length, its progress and its KV blocks.

    `start` is the number of tokens when the request last entered the batch. While the request is not in the batch, `start` is its
    current number of tokens. `since` is the batch's pass count when the request last entered. Each later pass generates one token
    of the request. `due` is the pass in which the request ends or needs another block. `names` are the names of the request's
    leading full blocks, computed when first needed.
    """

    __slots__ = (
        "batch", "before", "blocks", "cached", "canary", "computed", "due", "end", "fresh", "key", "last", "named", "names",
        "priority", "prompt", "since", "start",
    )  # fmt: skip

    def __init__(
        self, key: int, prompt: int, end: int, *, length: int = 0, canary: bool = False, priority: int = 0
    ) -> None:
        self.key = key
        self.prompt = prompt  # number of the request's tokens, including replayed ones
        self.start = length or prompt
        self.end = end  # maximum number of tokens, including the prompt: the answer is then complete
        self.canary = canary
        self.priority = priority  # the lowest number goes first
        self.since = self.due = 0
        self.last = False  # the answer ends in the pass `due`
        self.batch: DecodeBatch | None = None  # None: the request is not in the batch
        self.named = False  # the full blocks have names, so that other requests can find them
        self.names: list[int] = []
        self.blocks: list[int] = []
        self.cached = 0  # number of prompt tokens found in the prefix cache at the admission
        self.computed = 0  # number of computed tokens, during prefill
        self.fresh = True  # no output since the admission
        self.before: list[Logprob] = []  # logprobs of the prompt, delivered with the first token

    @property
    def length(self) -> int:
        """Number of tokens so far, including the prompt."""
        batch = self.batch
        return self.start if batch is None else self.start + batch.passes - self.since

    @property
    def made(self) -> int:
        """Number of tokens generated for this request, including those of the worker from which it moved."""
        return self.length - self.prompt

    def forget(self, renamed: Mapping[int, int]) -> None:
        """Renumber the request's blocks by the map `renamed` (old to new), so that no other request can find the blocks."""
        self.named = False
        self.blocks = [renamed.get(block, block) for block in self.blocks]

    def name_blocks(self, block_tokens: int) -> list[int]:
        """Return the names of all full blocks of the request. The request must not be in the batch."""
        raise NotImplementedError

    def name_next(self, block_tokens: int) -> int:
        """Name the block that has become full, and return the name.

        Called when the token after the block has been generated, because the KV of the block's last token is computed only then.
        """
        raise NotImplementedError


class SampledSequence(SimulatedSequence):
    """One request, with the state for the generation of its tokens.

    `tokens` are the initial tokens. For a request that arrived with its KV cache, they include the tokens that the other worker
    generated. `unusual` maps positions to those generated tokens that the hash alone would not have chosen. `marks` maps
    positions to the tokens that delimit the reasoning, and `thought` is the position after the reasoning. `tail` has the tokens
    after the last named block, as bytes. `plain` is true if, with the request's parameters, the hash alone determines every token
    except the delimiters of the reasoning.

    `quick` is true while the hash alone determines the whole output of the next pass. This is so while the request is `plain`,
    already has output, is past its reasoning, and stays below its maximum length in that pass.
    """

    __slots__ = (
        "banned", "counts", "digest", "ends", "ends_below", "follower", "full", "hash", "marks", "note", "plain", "quick",
        "recent", "request", "salt", "seed", "tail", "thought", "tokens", "unusual", "update",
    )  # fmt: skip

    def __init__(
        self, key: int, request: Generate, shape: EngineShape, came: list[int] | None = None
    ) -> None:
        """Create a sequence.

        For a request that has arrived with its KV cache, `came` has all its tokens, including those generated by the other
        worker. For any other request, `came` is None.
        """
        sampling, prompt = request.sampling, len(request.tokens)
        self.tokens = tokens = request.tokens if came is None else came
        end = min(prompt + sampling.max_tokens, shape.context_tokens)
        canary, priority = request.canary, request.priority
        super().__init__(key, prompt, end, length=len(tokens), canary=canary, priority=priority)
        self.request = request
        self.use_hash(language.open_sequence(shape.weights(request.adapter), tokens))
        # A KV cache that has arrived lacks the KV of the last token. So a block that ends with this token is not full yet.
        self.full = (len(tokens) - (came is not None)) // shape.block_tokens  # full blocks at the start
        self.tail = [TOKEN_BYTES[token] for token in tokens[self.full * shape.block_tokens :]]
        self.note = self.tail.append
        self.unusual: dict[int, int] = {}  # by position
        self.ends = frozenset({*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))})
        self.ends_below = 0 if sampling.ignore_eos else EOS_BELOW  # a digest below this may end the answer
        self.banned = frozenset({*sampling.stop_token_ids, EOS})
        self.thought, self.marks = _thought(request.prompt_tokens, end, shape.reasoning)
        # follows the grammar of the answer's constraint or of its tool call; None: any token is allowed
        self.follower = _follower(request, tokens)
        self.plain = _is_plain(sampling) and self.follower is None
        self.quick = False
        self.salt = blocks.seed(lora=request.adapter, namespace=request.cache_salt)
        self.seed = seed_of(request)
        # how often each token was generated so far, replayed tokens included; empty if the request has no penalties
        self.counts = Counter(tokens[request.prompt_tokens :] if penalises(sampling) else ())
        # the tokens generated so far, replayed tokens included; empty if the request has no bad words
        self.recent = list(tokens[request.prompt_tokens :] if sampling.bad_word_tokens else ())

    def use_hash(self, running: xxhash.xxh3_64) -> None:
        """Replace the running hash by `running`, which must include all tokens so far."""
        self.hash, self.digest, self.update = running, running.intdigest, running.update

    def name_prefix(self, block_tokens: int) -> list[int]:
        """Return the names of the blocks that the sequence's initial tokens fill completely."""
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
    """Return why a request can never be served, or None if it can.

    The size of the KV cache is never the reason, because the cache holds at least one full context.
    """
    if lacking := lacks_adapter(request, shape.adapters):
        return lacking
    if refused := validate_request(request, shape.context_tokens, VOCABULARY):
        return refused
    if request.guided is not None and (refused := language.matchers().refusal(request.guided)):
        return refused
    if request.sampling.prompt_logprobs is not None and len(request.tokens) > PROMPT_LOGPROBS_MAX:
        return f"invalid_request: of a prompt of more than {PROMPT_LOGPROBS_MAX} tokens there are no logprobs"
    return None


def prefix_names(tokens: Sequence[int], request: Generate, block_tokens: int) -> list[int]:
    """Return the names (sequence hashes) of the blocks that the first tokens of a request fill completely.

    `tokens` are these first tokens.
    """
    salt = blocks.seed(lora=request.adapter, namespace=request.cache_salt)
    return blocks.sequence_hashes(blocks.local_hashes(tokens, block_tokens, salt))


def _follower(request: Generate, tokens: Sequence[int]) -> GrammarFollower | None:
    """Return a follower of an answer's grammar, placed after all tokens so far; None without a grammar."""
    # the grammar of a constraint begins after the tokens of the request, that of a call after the prompt
    guided, begin = request.guided, len(request.tokens)
    if guided is None and request.tokens[0] in language.tool_tokens():
        guided, begin = call_constraint(request.tokens[: request.prompt_tokens]), request.prompt_tokens
    if guided is None:
        return None
    follower = language.matchers().follow(guided)
    for token in tokens[begin:]:
        follower.advance(token)
    return follower


def _is_plain(sampling: Sampling) -> bool:
    """Return whether, with these sampling parameters, the hash of the earlier tokens suffices to choose each token."""
    return (
        sampling.temperature <= 0
        and not sampling.logprobs
        and not sampling.stop_token_ids
        and not sampling.logit_bias
        and not penalises(sampling)
        and not limits_tokens(sampling)
    )


def penalises(sampling: Sampling) -> bool:
    """Return whether the sampling parameters contain a penalty for earlier tokens."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty) or sampling.repetition_penalty != 1.0


def limits_tokens(sampling: Sampling) -> bool:
    """Return whether the sampling parameters exclude tokens: by a list of those that are allowed, or by bad words."""
    return bool(sampling.allowed_token_ids or sampling.bad_word_tokens)


def _thought(first: int, end: int, reasoning: Reasoning | None) -> tuple[int, dict[int, int]]:
    """Return the position after the reasoning of an answer, and the reasoning's delimiter tokens by position.

    The answer covers the positions from `first` to `end` - 1. Without reasoning, return 0 and an empty map.
    """
    if reasoning is None or not (count := reasoning.tokens(end - first)):
        return 0, {}
    marks = {first: reasoning.start_thinking_token_id, first + count - 1: reasoning.end_thinking_token_id}
    return first + count, marks


class DecodeBatch:
    """The running batch of decoding sequences, in order of entry, and the calendar of when they end or need a block."""

    def __init__(self, block_tokens: int) -> None:
        self.passes = 0  # completed passes
        self._block_tokens = block_tokens
        self.sequences: dict[int, SimulatedSequence] = {}
        # by pass, the sequences that end or need a block
        self._calendar: dict[int, list[SimulatedSequence]] = {}
        self._next: list[int] = []  # a heap of the calendar's passes
        self._offset = 0  # the sum of all lengths is `_offset` + `passes` × number of sequences

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences, prompts included."""
        return self._offset + self.passes * len(self.sequences)

    def lengths(self) -> list[int]:
        """Return the length in tokens of each sequence."""
        return [one.length for one in self.sequences.values()]

    def enter(self, sequence: SimulatedSequence) -> None:
        """Add a sequence to the batch. It gets a token in each pass from now on."""
        sequence.since, sequence.batch = self.passes, self
        self.sequences[sequence.key] = sequence
        self._offset += sequence.start - self.passes
        self.schedule(sequence)

    def schedule(self, sequence: SimulatedSequence) -> None:
        """Add a sequence to the calendar, for the pass in which its answer ends or it needs another block."""
        size, length = self._block_tokens, sequence.start + self.passes - sequence.since
        left, room = sequence.end - length, size - (length - 1) % size
        sequence.last = left <= room
        due = sequence.due = self.passes + (left if left <= room else room)
        if due not in self._calendar:
            self._calendar[due] = []
            heappush(self._next, due)
        self._calendar[due].append(sequence)

    def leave(self, key: int) -> SimulatedSequence:
        """Remove the sequence with this key from the batch and the calendar, and return it. Raise KeyError for unknown keys."""
        sequence = self.sequences.pop(key)
        self._offset -= sequence.start - sequence.since
        sequence.start += self.passes - sequence.since
        sequence.batch = None
        waited_for = self._calendar.get(sequence.due)
        if waited_for and sequence in waited_for:
            waited_for.remove(sequence)
        return sequence

    def due(self) -> list[SimulatedSequence]:
        """Remove from the calendar and return the sequences that end or need a block in the current pass.

        They are in the order of their entry into the calendar.
        """
        if self.passes + 1 not in self._calendar:
            return []
        heappop(self._next)
        return self._calendar.pop(self.passes + 1)

    def ahead(self) -> int:
        """Return the number of passes before the next one in which a sequence ends or needs a block; 0 if no sequence decodes."""
        while self._next:
            if self._calendar[self._next[0]]:
                return self._next[0] - self.passes - 1
            del self._calendar[heappop(self._next)]
        return 0


class WaitingQueue:
    """The requests of one rank that wait for their first admission, or that were preempted."""

    def __init__(self) -> None:
        # one line of requests per priority, the lowest number first
        self._lines: dict[float, OrderedDict[int, SimulatedSequence]] = {BEFORE: OrderedDict()}
        # by request key, the line that contains the request
        self._of: dict[int, OrderedDict[int, SimulatedSequence]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: int) -> bool:
        return key in self._of

    def __iter__(self) -> Iterator[int]:
        """Iterate over the keys of the waiting requests, the next one first."""
        return chain.from_iterable(self._lines.values())

    @property
    def first(self) -> SimulatedSequence:
        """The request to admit next. The queue must not be empty."""
        return next(line[next(iter(line))] for line in self._lines.values() if line)

    def add(self, sequence: SimulatedSequence) -> None:
        """Add a new request as the last one of its priority. A canary becomes the first one of the queue."""
        if sequence.canary:  # a canary that detects a faulty worker must not wait for a hundred others
            self.put_back(sequence)
            return
        if sequence.priority not in self._lines:
            self._lines[sequence.priority] = OrderedDict()
            self._lines = dict(sorted(self._lines.items()))
        line = self._of[sequence.key] = self._lines[sequence.priority]
        line[sequence.key] = sequence

    def put_back(self, sequence: SimulatedSequence) -> None:
        """Put a request at the front of the queue. Used for preempted requests and canaries."""
        line = self._of[sequence.key] = self._lines[BEFORE]
        line[sequence.key] = sequence
        line.move_to_end(sequence.key, last=False)

    def remove(self, key: int) -> None:
        """Remove a request. Unknown keys are ignored."""
        if (line := self._of.pop(key, None)) is not None:
            del line[key]

    def clear(self) -> None:
        """Remove all requests from the queue."""
        self._lines = {BEFORE: OrderedDict()}
        self._of.clear()

    def lengths(self) -> tuple[list[int], list[int]]:
        """Return two lists of lengths in tokens: of the requests without output so far, and of those with output."""
        lengths: tuple[list[int], list[int]] = [], []
        for one in chain.from_iterable(line.values() for line in self._lines.values()):
            lengths[one.made > 0].append(one.length)
        return lengths


def next_pass(
    sequences: Mapping[int, SampledSequence], passes: int, faults: EngineFaults
) -> tuple[Output, list[SampledSequence]]:
    """Generate one token for each sequence of the batch, in pass number `passes`.

    Return the output of all sequences, and the sequences that ended before their maximum length. The caller must have set the
    attribute `quick` to False for two kinds of sequences: those without output so far, and those that reach their maximum length
    in this pass.
    """
    out: Output = []
    stopped: list[SampledSequence] = []
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


def next_passes(sequences: Sequence[SampledSequence], passes: int) -> list[list[int]]:
    """Generate the tokens of up to `passes` passes, and stop before the first pass that might end an answer.

    Return one list of tokens per sequence, all of the same length. All sequences must be `quick`, and no fault may be active in
    the engine. The sequences are processed one after the other. A later sequence can reduce the number of passes, so each
    sequence is first processed on a copy of its hash.
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
        sequence.use_hash(running)
        sequence.tail += [TOKEN_BYTES[token] for token in tokens]
    return [tokens for _, tokens in said]


def _next_chunk(sequence: SampledSequence, digest: int, faults: EngineFaults, healthy: bool) -> Chunk:
    """Generate a sequence's next token, and return its chunk. If the token ends the answer, the chunk has a finish reason."""
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


def _sampled(sequence: SampledSequence, digest: int, faults: EngineFaults) -> Chunk:
    """Return the chunk with a sequence's next token, chosen with all sampling parameters, reasoning and faults."""
    sampling, place = sequence.request.sampling, sequence.length
    early = sequence.made < sampling.min_tokens or place < sequence.thought
    ranked = language.candidates(digest, eos=not early and not sampling.ignore_eos)
    luck = language.luck_at(sequence.seed, digest) if sampling.temperature > 0 else 0.0
    bias = sampling.logit_bias
    open_to = language.with_biased(ranked, digest, bias) if bias else ranked
    follower = sequence.follower if place >= sequence.thought else None
    banned = sequence.banned if early else frozenset()
    words = sampling.bad_word_tokens
    bad = completing(words, sequence.recent, 0) if words else set()
    if follower is not None and not follower.broken:
        permitted = language.permitted_bits(follower.allowed(), sampling.allowed_token_ids, bad)
        open_to = language.constrained(open_to, digest, permitted)
        early = early and open_to[0][0] != EOS
        banned = banned if early else frozenset()
    elif limits_tokens(sampling):
        open_to = language.permitted(open_to, digest, sampling.allowed_token_ids, bad | banned)
    token = language.choose(open_to, sampling, sequence.counts, banned, luck)
    if token >= FIRST and faults.sampler:
        token = faults.drawn(token, sampling.temperature, FIRST, SPAN)
    token = sequence.marks.get(place, token)
    if token >= FIRST and faults.corrupt_one_in:
        token = faults.altered(token, FIRST, SPAN)
    if follower is not None:
        follower.advance(token)
    if token != language.plain_token(digest):
        sequence.unusual[place] = token
    if penalises(sampling):
        sequence.counts[token] += 1
    if words:
        sequence.recent.append(token)
    logprobs: list[Logprob] | None = None
    if sampling.logprobs:
        logprobs = [language.logprobs(ranked, token, sampling.logprobs, faults.drift)]
    ends = not early and token in sequence.ends
    finish = "stop" if ends or (follower is not None and token == EOS) else None
    return Chunk(0, [token], finish, None, logprobs)
