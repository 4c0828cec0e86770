"""One request inside the simulated engine, and the bounds it lives in."""

from collections.abc import Mapping
from collections.abc import Sequence as Sequential
from dataclasses import dataclass
from typing import Literal, Protocol

import xxhash

from events import blocks
from events.errors import UsageError
from events.wire import Generate, Logprob, Sampling
from workers.engines.simulated import language
from workers.engines.simulated.kv.evictors import EvictorKind
from workers.engines.simulated.language import EOS, EOS_BELOW, TOKEN_BYTES, VOCABULARY
from workers.engines.simulated.reasoning import Reasoning

Preemption = Literal["newest", "oldest"]
KV_BLOCK_BYTES = 4096
PROMPT_LOGPROBS_MAX = (
    4096  # tokens of a prompt whose logprobs are wanted: 20 µs each, for which everybody waits
)


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
    preemption: Preemption = "newest"  # who goes back to waiting when blocks run out
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


class Passing(Protocol):
    """The batch that a sequence is in, as the sequence sees it."""

    passes: int  # that have ended


class SimulatedSequence:
    """What the scheduler knows of a request: how long it is, when that matters, and which KV blocks it holds.

    `start` is its length when it last came into the batch, or is now if it is not there; the batch knows how much it has
    said since. `names` are the names of its full blocks, as far as anybody needs them.
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
        self.batch: Passing | None = None
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
        """Go on with blocks that nobody else can find."""
        self.named = False
        self.blocks = [renamed.get(block, block) for block in self.blocks]

    def name_blocks(self, block_tokens: int) -> list[int]:
        """Return the names of all its full blocks. It is not in the batch."""
        raise NotImplementedError

    def name_next(self, block_tokens: int) -> int:
        """Name the block that has just become full and return its name: one token after it has been said."""
        raise NotImplementedError


class Silent(SimulatedSequence):
    """A request whose tokens nobody wants: it is only counted. `names` may go on into the answer; what they do not name
    gets a name that no other request has."""

    __slots__ = ("_given", "_salt")

    def __init__(
        self, key: int, prompt: int, answer: int, names: Sequential[int], *, canary: bool = False
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
    """A request whose tokens are said.

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


def prefix_names(tokens: Sequential[int], request: Generate, block_tokens: int) -> list[int]:
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
