"""One request inside the engine, and its part of a step. No torch, no clock, no thread."""

from dataclasses import dataclass, field

from events.blocks import SEED, follow, local_hashes
from events.wire import Logprob, Sampling


@dataclass(slots=True, eq=False)
class TorchSequence:
    """One request inside the engine. `tokens` grows; the first `cached` of them have stored keys and values."""

    key: int
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    seed: int
    left: int = 1  # maximum number of tokens to generate
    ends: frozenset[int] = frozenset()
    barred: frozenset[int] = frozenset()  # not before `min_tokens`
    canary: bool = False
    priority: int = 0  # the lowest goes first
    submitted: int = -1  # initial number of tokens; -1: those in `tokens`
    moved: bool = False  # it arrived with its KV cache
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    salt: int = SEED  # of its blocks' names
    shares: bool = False  # it shares full blocks with other requests, both ways
    found: int = 0  # tokens found in the prefix cache
    named: int = 0  # number of leading blocks offered to others
    names: list[int] = field(default_factory=list)  # of its full blocks, as far as they were needed
    before: list[Logprob] = field(default_factory=list)  # of its prompt, delivered with its first token

    def __post_init__(self) -> None:
        if self.submitted < 0:
            self.submitted = len(self.tokens)

    @property
    def generated(self) -> int:
        """Tokens generated for this request since it was submitted, here or at its previous worker."""
        return len(self.tokens) - self.submitted

    @property
    def asks_of_prompt(self) -> bool:
        """Whether the logprobs of its prompt are still to be computed."""
        return self.sampling.prompt_logprobs is not None and not self.generated and not self.moved

    @property
    def uncached(self) -> int:
        """Tokens that have to go through the model before the next one can be chosen."""
        return len(self.tokens) - self.cached

    def names_of(self, count: int, size: int) -> list[int]:
        """Return the names of its first `count` blocks, of `size` tokens each."""
        names = self.names
        if len(names) < count:
            for local in local_hashes(self.tokens[len(names) * size : count * size], size, self.salt):
                names.append(follow(names[-1], local) if names else local)
        return names[:count]


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """One sequence's part of a step: `count` tokens from `start` on. `samples`: the next token is due."""

    sequence: TorchSequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)
