"""One request inside the engine, and its part of a step. No torch, no clock, no thread."""

from dataclasses import dataclass, field

from events.blocks import SEED, follow, local_hashes
from events.wire import Logprob, Sampling


@dataclass(slots=True, eq=False)
class TorchSequence:
    """One request inside the engine. `tokens` grows; the first `cached` of them have their keys and values stored."""

    key: int
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    seed: int
    left: int = 1  # tokens to generate at most
    ends: frozenset[int] = frozenset()
    barred: frozenset[int] = frozenset()  # not before `min_tokens`
    canary: bool = False
    priority: int = 0  # of those that wait the least goes first
    submitted: int = -1  # tokens that it came with; -1: those that it has
    moved: bool = False  # it came with its KV cache
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    salt: int = SEED  # of its blocks' names
    shares: bool = False  # its full blocks may be found by others, and theirs by it
    found: int = 0  # tokens of it that were in the prefix cache
    named: int = 0  # its first so many blocks have been offered to others
    names: list[int] = field(default_factory=list)  # of its full blocks, as far as they were wanted
    before: list[Logprob] = field(default_factory=list)  # of its prompt: they come with its first token

    def __post_init__(self) -> None:
        if self.submitted < 0:
            self.submitted = len(self.tokens)

    @property
    def generated(self) -> int:
        """Tokens generated for this request since it was submitted, here or where it was before it moved."""
        return len(self.tokens) - self.submitted

    @property
    def asks_of_prompt(self) -> bool:
        """Whether the logprobs of its prompt are still to be found."""
        return self.sampling.prompt_logprobs is not None and not self.generated and not self.moved

    @property
    def uncached(self) -> int:
        """Tokens that have to go through the model before the next one can be chosen."""
        return len(self.tokens) - self.cached

    def names_of(self, count: int, size: int) -> list[int]:
        """Return the names of its first so many blocks, of `size` tokens each."""
        names = self.names
        if len(names) < count:
            for local in local_hashes(self.tokens[len(names) * size : count * size], size, self.salt):
                names.append(follow(names[-1], local) if names else local)
        return names[:count]


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """One sequence's part of a step: its tokens from `start`, `count` of them. `samples`: the next token falls due."""

    sequence: TorchSequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)
