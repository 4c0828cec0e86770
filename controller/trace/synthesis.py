"""Generates requests like those that a profile was learned from.

A prompt is a walk down the tree of shared prefixes. At each prefix, the outcome is drawn as often as it was
observed: a next prefix, the end, or an own part of the prompt. Draws are deals from decks (`Deck`). So as many requests as
the profile was learned from share as much as those in the trace did, and as soon after one another. The outcome of the first
prompt at a prefix is dealt first: no prompt can return to a prefix that does not exist yet. When all decks are used up, they
start again with new ids, except for lasting prefixes: more requests are more conversations.

The next prefix depends on the current one and on what was dealt there, not on the path to it (a Markov chain). Paths, own
parts, outputs and times are drawn independently, each from its own random source: a knob changes only the quantity that it
names, and no other draw.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Generic, TypeVar, cast

import numpy as np

from controller.trace.profile import TraceProfile
from controller.trace.rows import TOKENS_MAX, BadTrace, TraceRow, bounded
from controller.trace.tree import ALONE, ROOT, Core, depth_class, size_class
from events.errors import UsageError

V = TypeVar("V", bound=float)


class Deck(Generic[V]):
    """Deals values in rounds: every slot of the distribution once, in random order, then the next round.

    Independent draws from an empirical distribution do not keep the frequencies: in four cases of ten, a prefix shared by two
    prompts would be visited by one prompt or by none. A deck deals every observed value as often as it was observed before any
    value is repeated.
    """

    def __init__(self, counts: Mapping[V, int], chance: Random) -> None:
        self.counts = {value: count for value, count in sorted(counts.items()) if count}
        self.chance = chance
        self._left: list[V] = []

    @property
    def begins(self) -> bool:
        """Return whether the next deal begins a round."""
        return not self._left

    def deal(self) -> V:
        """Return the next value. The deck must not be empty."""
        if not self._left:
            self._left = self.order()
            self._left.reverse()
        return self._left.pop()

    def order(self) -> list[V]:
        """Return the values of a round in the order in which they are dealt."""
        values = [value for value, count in self.counts.items() for _ in range(count)]
        self.chance.shuffle(values)
        return values


class ReturningDeck(Deck[int]):
    """Deals outcomes that recur as soon as they did in the trace.

    `gaps` has, for some outcomes, the observed numbers of deals between two occurrences. Every round begins with `first`.
    Outcomes without gaps are dealt at random.
    """

    def __init__(
        self, counts: Mapping[int, int], chance: Random, first: int, gaps: Mapping[int, Deck[int]]
    ) -> None:
        super().__init__(counts, chance)
        self._first = first
        self._gaps = gaps

    def order(self) -> list[int]:
        """Return a round's outcomes: each outcome first at a random time, then again after drawn gaps."""
        due: list[tuple[float, int]] = []
        total = sum(self.counts.values())
        for outcome, count in self.counts.items():
            gaps = self._gaps.get(outcome)
            if gaps is None or count == 1:
                times = [self.chance.random() * total for _ in range(count)]
                if outcome == self._first:
                    times[0] = -1.0
            else:
                times = list(accumulate((gaps.deal() for _ in range(count - 1)), initial=0))
                scale = min(1.0, total / (times[-1] + 1))
                begin = -1.0 if outcome == self._first else self.chance.random() * (total - times[-1] * scale)
                times = [begin + time * scale for time in times]
            due += [(time, outcome) for time in times]
        due.sort()
        return [outcome for _, outcome in due]


REJECTIONS_MAX = 10_000
MULTIPLIER_MAX = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisKnobs:
    """Changes relative to the trace: lengths and counts are multiplied, times divided. Raise UsageError if invalid."""

    prefix_len_multiplier: float = 1.0  # length of shared prefixes
    prefix_root_multiplier: int = 1  # number of disjoint copies of the learned tree
    prompt_len_multiplier: float = 1.0  # length of prompts' own parts
    osl_multiplier: float = 1.0  # length of outputs
    speedup_ratio: float = 1.0  # rate of requests
    max_isl: int | None = None  # longer prompts are redrawn
    max_osl: int | None = None  # longer outputs are cut

    def __post_init__(self) -> None:
        for name in ("prefix_len_multiplier", "prompt_len_multiplier", "osl_multiplier", "speedup_ratio"):
            if not 1 / MULTIPLIER_MAX <= (value := getattr(self, name)) <= MULTIPLIER_MAX:
                low, high = f"{1 / MULTIPLIER_MAX:g}", f"{MULTIPLIER_MAX:g}"
                raise UsageError(
                    f"--{name.replace('_', '-')} must be a number from {low} to {high}, not {value:g}"
                )
        for name in ("prefix_root_multiplier", "max_isl", "max_osl"):
            if (value := getattr(self, name)) is not None and not 1 <= value <= TOKENS_MAX:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be a number from 1 to {TOKENS_MAX}, not {value}"
                )


def synthesize(
    profile: TraceProfile, requests: int, knobs: SynthesisKnobs | None = None, *, seed: int = 0
) -> Iterator[TraceRow]:
    """Yield `requests` requests, in bounded memory; the same ones for the same seed.

    Raise BadTrace if no prompt is short enough.
    """
    knobs = knobs or SynthesisKnobs()
    prompts = _Prompts(profile, knobs, seed)
    output, times = Deck(profile.outputs, _chance(seed, "outputs")), _times(profile, knobs, seed)
    for _ in range(requests):
        length, ids = prompts.draw()
        said = output.deal()
        if said:
            said = max(1, round(said * knobs.osl_multiplier))
        said = bounded(said) if knobs.max_osl is None else min(said, knobs.max_osl)
        yield TraceRow(next(times), length, said, ids)


def _chance(seed: int, purpose: str) -> Random:
    return Random(f"{seed} {purpose}")


@dataclass(slots=True)
class _Prefix:
    """A shared prefix with its decks."""

    ids: range
    lasting: bool
    onward: ReturningDeck  # index of the next prefix, END or ALONE
    rest: Deck[int]  # tokens in the last block of a prompt that ends here
    # Blocks of the own part of a prompt that continues alone from here:
    first_leaf: Deck[int] | None  # for the first prompt that arrives here
    later_leaf: Deck[int] | None  # for all other prompts


class _Prompts:
    """Draws prompts: their lengths and blocks."""

    def __init__(self, profile: TraceProfile, knobs: SynthesisKnobs, seed: int) -> None:
        self._block, self._knobs = profile.block_tokens, knobs
        self._leaf_rest = Deck(profile.core.leaf_rests, _chance(seed, "leaf rests"))
        self._copy = _chance(seed, "copies")
        self._prefixes = _prefixes(profile, knobs, seed)
        self._tree = self._prefixes[-1].ids.stop  # number of ids of one tree
        self._began = False
        self._shift = 0  # offset of the ids of prefixes that are not lasting
        self._own = self._tree * knobs.prefix_root_multiplier  # the next unused id

    def draw(self) -> tuple[int, list[int]]:
        """Return the next prompt's length in tokens and its blocks."""
        limit = self._knobs.max_isl
        for _ in range(REJECTIONS_MAX):
            length, ids, blocks = self._walk()
            if limit is None or length <= limit:
                return bounded(length), self._named(ids, blocks)
        raise BadTrace(f"{REJECTIONS_MAX} consecutive prompts were longer than --max-isl {limit}")

    def _walk(self) -> tuple[int, list[int], int]:
        """Return a prompt's length, its shared blocks, and the number of its own blocks after them."""
        ids: list[int] = []
        if self._began and self._prefixes[ROOT].onward.begins:
            self._shift = self._own
            self._own += self._tree * self._knobs.prefix_root_multiplier
        self._began = True
        place = ROOT
        while place >= ROOT:
            prefix = self._prefixes[place]
            ids += prefix.ids if prefix.lasting else [block + self._shift for block in prefix.ids]
            is_first = prefix.onward.begins
            place = prefix.onward.deal()
        shared = len(ids) * self._block
        if place == ALONE:
            leaf = prefix.first_leaf if is_first else prefix.later_leaf
            assert leaf is not None
            own = self._scaled((leaf.deal() - 1) * self._block + self._leaf_rest.deal())
            return shared + own, ids, -(-own // self._block)
        rest = prefix.rest.deal()
        return (shared - self._block + rest, ids, 0) if ids else (self._scaled(rest), ids, 0)

    def _scaled(self, own: int) -> int:
        """Return the length of a prompt's own part after scaling."""
        return bounded(max(1, round(own * self._knobs.prompt_len_multiplier))) if own else 0

    def _named(self, ids: list[int], blocks: int) -> list[int]:
        copies = self._knobs.prefix_root_multiplier
        if copies > 1:
            first = self._tree * self._copy.randrange(copies)
            ids = [block + first for block in ids]
        ids += range(self._own, self._own + blocks)
        self._own += blocks
        return ids


def _prefixes(profile: TraceProfile, knobs: SynthesisKnobs, seed: int) -> list[_Prefix]:
    """Return the shared prefixes with their decks. Their ids are consecutive."""
    paths, rests, leaves = (_chance(seed, purpose) for purpose in ("paths", "rests", "leaves"))
    core = profile.core
    first = {key: Deck(counts, leaves) for key, counts in sorted(core.first_leaves.items())}
    later = {key: Deck(counts, leaves) for key, counts in sorted(core.later_leaves.items())}
    returns = {
        key: {below: Deck(counts, paths) for below, counts in sorted(pools.items())}
        for key, pools in sorted(core.returns.items())
    }
    prefixes: list[_Prefix] = []
    for node, ids, depth, outcomes in zip(
        core.nodes, _ids(core, knobs, profile.block_tokens), core.depths(), core.outcomes(), strict=True
    ):
        gaps = {
            child: returns[size_class(node.visits)][size_class(count)]
            for child, count in outcomes.items()
            if child > ROOT and count > 1
        }
        onward, rest = ReturningDeck(outcomes, paths, node.first, gaps), Deck(node.rests, rests)
        pool = depth_class(depth)
        prefixes.append(_Prefix(ids, node.lasting, onward, rest, first.get(pool), later.get(pool)))
    return prefixes


def _ids(core: Core, knobs: SynthesisKnobs, block_tokens: int) -> Iterator[range]:
    """Yield each node's ids. Depths are scaled, not single lengths: rounding errors of small lengths would add up."""
    ends: list[int] = []
    free = 0
    for node, depth in zip(core.nodes, core.depths(), strict=True):
        begins = ends[node.parent] if ends else 0
        ends.append(max(begins + 1, round(depth * knobs.prefix_len_multiplier)) if ends else 0)
        bounded(ends[-1] * block_tokens)
        yield range(free, free := free + ends[-1] - begins)


def _times(profile: TraceProfile, knobs: SynthesisKnobs, seed: int) -> Iterator[float]:
    """Yield arrival times in ms, with the observed group sizes and gaps."""
    group = Deck(profile.groups, _chance(seed, "groups"))
    gap = Deck(dict(profile.gaps), _chance(seed, "gaps"))
    now = 0.0
    while True:
        for _ in range(group.deal()):
            yield now / knobs.speedup_ratio
        now += gap.deal() if profile.gaps else 0.0


def tokens(row: TraceRow, block_tokens: int, vocabulary: range) -> list[int]:
    """Return the prompt of a request with hash ids: one block of tokens per id, cut to the prompt's length."""
    prompt: list[int] = []
    for name in row.hash_ids:
        prompt += block(name, block_tokens, vocabulary)
    return prompt[: row.input_length]


def block(name: int | str, length: int, vocabulary: range) -> list[int]:
    """Return the tokens of the block with this name. The same name always gives the same tokens."""
    drawn = np.frombuffer(Random(name).randbytes(4 * length), "<u4")  # four times as fast as `choices`
    return cast(list[int], (drawn % len(vocabulary) + vocabulary.start).tolist())
