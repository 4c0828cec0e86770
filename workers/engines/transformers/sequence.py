"""The state of one request inside the engine, and the request's part of a step."""

from dataclasses import dataclass, field

from events.blocks import SEED, follow, local_hashes
from events.wire import Logprob, Sampling
from workers.engines.constrained import GrammarFollower


@dataclass(slots=True, eq=False)
class TorchSequence:
    """The state of one request inside the engine."""

    key: int
    tokens: list[int]  # the prompt and all tokens generated so far
    prompt_tokens: int
    sampling: Sampling
    seed: int
    left: int = 1  # maximum number of tokens to generate
    ends: frozenset[int] = frozenset()  # token ids that end the answer
    barred: frozenset[int] = frozenset()  # token ids that may not be generated before `min_tokens`
    canary: bool = False
    priority: int = 0  # the lowest number goes first
    submitted: int = -1  # number of tokens at submission; -1: the current length of `tokens`
    moved: bool = False  # the request arrived with its KV cache
    cached: int = 0  # the blocks hold the KV of this many tokens, counted from the first
    blocks: list[int] = field(default_factory=list)
    salt: int = SEED  # seed of the blocks' names
    shares: bool = False  # the request may use other requests' full blocks, and they may use its blocks
    found: int = 0  # number of prompt tokens found in the prefix cache
    named: int = 0  # number of leading blocks that have names in the prefix cache
    # names of the leading full blocks, computed when first needed
    names: list[int] = field(default_factory=list)
    # logprobs of the prompt, delivered with the first token
    before: list[Logprob] = field(default_factory=list)
    follower: GrammarFollower | None = None  # follows the grammar of the answer's constraint

    def __post_init__(self) -> None:
        if self.submitted < 0:
            self.submitted = len(self.tokens)

    @property
    def generated(self) -> int:
        """Number of tokens generated since the submission, including those of a worker from which the request moved."""
        return len(self.tokens) - self.submitted

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the logprobs of the request's prompt must still be computed."""
        return self.sampling.prompt_logprobs is not None and not self.generated and not self.moved

    @property
    def uncached(self) -> int:
        """Number of tokens without KV, which must go through the model before the next token can be chosen."""
        return len(self.tokens) - self.cached

    def names_of(self, count: int, size: int) -> list[int]:
        """Return the names (sequence hashes) of the request's first `count` full blocks, with `size` tokens per block."""
        names = self.names
        if len(names) < count:
            for local in local_hashes(self.tokens[len(names) * size : count * size], size, self.salt):
                names.append(follow(names[-1], local) if names else local)
        return names[:count]


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """One sequence's part of a step: the model computes `count` tokens, from the token at index `start` on.

    `samples` is true if these are the sequence's last tokens. The step then also chooses the token that follows them.
    """

    sequence: TorchSequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)
