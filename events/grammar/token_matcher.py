"""Computes the tokens that a grammar allows next, for engines that compute their own logits.

For each deterministic state, two sets are computed once and cached. They are the tokens that the state allows within its rule,
and the token prefixes at which the rule may end. Both depend on the deterministic state alone (as in the adaptive token mask
cache of xgrammar, Dong et al. 2024).

A state of the recogniser has one or more deterministic states, and allows the tokens of all of them. From the prefixes at which
a rule ends, the search continues in the rules of the actual callers.
"""

from collections.abc import Iterator

from events.grammar.automaton import DState, PushdownAutomaton
from events.grammar.model import LAST, Grammar, check
from events.grammar.recogniser import CallFrame, Configuration, begin, close
from events.grammar.refusals import TextRejected
from events.grammar.utf8 import Utf8State, completions, reads_between
from events.grammar.vocabulary import OTHERS, TokenVocabulary, TrieNode

CACHED_STATES = 5_000
CACHED_RETURNS = 20_000


class _Local:
    """What one deterministic state allows by itself.

    `allowed` are tokens as bits, and `ends` are the token prefixes at which the state's rule may end.
    """

    __slots__ = ("allowed", "ends")

    def __init__(self, allowed: int, ends: list[TrieNode]) -> None:
        self.allowed = allowed
        self.ends = ends


class TokenMatcher:
    """Follows answers token by token. Each answer has a state of its own.

    The states are immutable. The caller keeps the current state of each answer.
    """

    def __init__(self, grammar: Grammar, vocabulary: TokenVocabulary) -> None:
        """Prepare the grammar's automaton. Raise GrammarRefused if the grammar is too large, or if no text matches it."""
        self.vocabulary = vocabulary
        self._automaton = PushdownAutomaton(check(grammar))
        self._local: dict[DState, _Local] = {}
        self._loops: dict[DState, int] = {}
        self._returns: dict[tuple[TrieNode, DState], tuple[tuple[int, ...], list[TrieNode]]] = {}
        self._stop = vocabulary.bits(vocabulary.stop)

    def start(self) -> Utf8State:
        """Return the state before the first token."""
        return Utf8State(begin(self._automaton))

    def advance(self, state: Utf8State, token: int) -> Utf8State:
        """Return the state after a token. A stop token does not change the state.

        Raise TextRejected if the token is not allowed.
        """
        if token in self.vocabulary.stop:
            if state.accepting:
                return state
            raise TextRejected(0)
        if not self.vocabulary.tokens.get(token):
            raise TextRejected(0)
        return state.advance(self.vocabulary.tokens[token])

    def allowed(self, state: Utf8State) -> int:
        """Return the allowed tokens as bits: bit n is token n. Stop tokens are allowed where the text may end."""
        if state.pending:
            return self.vocabulary.bits(
                number for data, number in self.vocabulary.headed if state.allowed(data)
            )
        found = self._stop if state.accepting else 0
        ends: list[tuple[TrieNode, CallFrame]] = []
        for frame, one in state.state.configurations:
            local = self._of(one)
            found |= local.allowed
            ends.extend((node, frame) for node in local.ends)
        return found | self.vocabulary.bits(self._after_returns(ends)) if ends else found

    def allowed_tokens(self, state: Utf8State) -> list[int]:
        """Return the ids of the allowed tokens, in ascending order."""
        bits = self.allowed(state)
        return [number for number in range(self.vocabulary.size) if bits >> number & 1]

    # --- parts ------------------------------------------------------------------------------------------------------

    def _of(self, state: DState) -> _Local:
        found = self._local.get(state)
        if found is None:
            if len(self._local) >= CACHED_STATES:
                self._local, self._loops = {}, {}
            outside = CallFrame()  # stands for callers that are not known
            walk = _Walk(self, outside)
            walk.visit(self.vocabulary.root, ((outside, state),), False)
            found = self._local[state] = _Local(self.vocabulary.bits(walk.numbers()), walk.ends)
        return found

    def _after_returns(self, ends: list[tuple[TrieNode, CallFrame]]) -> Iterator[int]:
        """Yield the allowed tokens in which a rule ends and a caller's rule continues.

        `ends` are the prefixes at which a rule may end, each with the frame of that rule.
        """
        seen = set(ends)
        while ends:
            node, frame = ends.pop()
            for caller, one in frame.callers.items():
                tokens, further = self._from(node, one)
                yield from tokens
                following = {(end, caller) for end in further} - seen
                seen |= following
                ends.extend(following)

    def _from(self, node: TrieNode, state: DState) -> tuple[tuple[int, ...], list[TrieNode]]:
        """Return the tokens that begin with the prefix `node` and continue as `state` allows.

        Also return the prefixes at which the rule of `state` may end. `state` is the state of a caller after the return.
        """
        found = self._returns.get((node, state))
        if found is None:
            if len(self._returns) >= CACHED_RETURNS:
                self._returns = {}
            outside = CallFrame()
            live, ended = close(self._automaton, outside, [(outside, state)])
            walk = _Walk(self, outside)
            walk.visit(node, live, False)
            found = tuple(walk.numbers()), [*walk.ends, node] if ended else walk.ends
            self._returns[node, state] = found
        return found

    def loops(self, state: DState) -> int:
        """Return, as bits, the set of the characters that leave `state` unchanged.

        Bit n is the ASCII character n, and `OTHERS` stands for all characters outside ASCII.
        """
        found = self._loops.get(state)
        if found is None:
            found = self._loops[state] = _loops(self._automaton, state)
        return found

    @property
    def automaton(self) -> PushdownAutomaton:
        """The automaton of the grammar."""
        return self._automaton


class _Walk:
    """A search for allowed tokens in the vocabulary, from some pairs of a frame and a state.

    `ends` are the token prefixes at which the outermost rule may end.
    """

    def __init__(self, matcher: TokenMatcher, outermost: CallFrame) -> None:
        self._matcher = matcher
        self._automaton = matcher.automaton
        self._outermost = outermost
        self._ranges: list[tuple[int, int]] = []
        self._found: list[int] = []
        self.ends: list[TrieNode] = []

    def numbers(self) -> Iterator[int]:
        """Yield the ids of the allowed tokens that the search has found."""
        ranked = self._matcher.vocabulary.ranked
        for first, last in self._ranges:
            yield from ranked[first:last]
        yield from self._found

    def visit(self, node: TrieNode, configurations: tuple[Configuration, ...], reached: bool) -> None:
        """Find the allowed tokens that are longer than the prefix `node` and begin with it.

        If `reached` is set, also find the tokens that equal the prefix.
        """
        left = [(node, configurations, reached)]
        while left:
            node, configurations, reached = left.pop()
            if reached:
                self._found += node.here
            if not configurations:
                continue
            if node.tails:
                self._add_tails(node, configurations)
            if len(configurations) == 1 and node.alphabet & ~self._matcher.loops(configurations[0][1]) == 0:
                self._ranges.append((node.first, node.last))
                continue
            for char, child in node.children.items():
                after = self._step(char, child, configurations)
                if after is not None:
                    left.append((child, after, True))

    def _step(
        self, char: str, child: TrieNode, configurations: tuple[Configuration, ...]
    ) -> tuple[Configuration, ...] | None:
        """Return the pairs of a frame and a state after a character, or None if the character is not allowed."""
        self._automaton.read(1)
        steps = ((frame, self._automaton.step(state, char)) for frame, state in configurations)
        reached = [(frame, after) for frame, after in steps if after is not None]
        if not reached:
            return None
        if len(reached) == 1 and reached[0][1].quiet:
            return (reached[0],)
        after, ended = close(self._automaton, self._outermost, reached)
        if ended and (child.children or child.tails):
            self.ends.append(child)
        return after

    def _add_tails(self, node: TrieNode, configurations: tuple[Configuration, ...]) -> None:
        for tail, number in node.tails:
            bounds = completions(tail)
            if bounds and any(reads_between(state, *bounds) for _, state in configurations):
                self._found.append(number)


def _loops(automaton: PushdownAutomaton, state: DState) -> int:
    if not state.quiet:
        return 0
    found = 0
    for code in range(128):
        if automaton.step(state, chr(code)) is state:
            found |= 1 << code
    uniform = all(ord(char) < 128 for char in state.singles) and all(
        high < 128 or (low <= 128 and high == LAST) for group, _ in state.ranges for low, high in group.ranges
    )
    if uniform and automaton.step(state, "\x80") is state:
        found |= OTHERS
    return found
