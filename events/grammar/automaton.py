"""The automaton of a grammar: a pushdown automaton that is made deterministic while it reads.

A *position* is the rest of a rule that is still to be read, as a linked list of expressions (a partial derivative, Antimirov
1996). Reading a character leads from one position to others. A reference at the end of a rule is a jump, so that right
recursion needs no stack. Any other reference is a call, which returns to the position after the reference.

A *deterministic state* is a set of positions (subset construction). The automaton makes a state when a text first reaches it.
The next states are cached by character, so that a character inside a string costs one lookup. A counted repetition is not
written out: a position carries the remaining count, and is created only when a text reaches the position.
"""

from bisect import bisect_right
from collections.abc import Iterable

from events.grammar.model import (
    ANY_CHARACTER,
    Alternation,
    CharClass,
    Expression,
    Grammar,
    Literal,
    Reference,
    Repeat,
    Sequence,
    is_nullable,
    literal,
    nullable_rules,
    repeat,
    walk,
)
from events.grammar.refusals import BURST_STEPS, MAX_POSITIONS, STEPS_PER_CHARACTER, refuse

CACHED_STATES = 20_000  # deterministic states that an automaton remembers
CACHED_CHARACTERS = 1_000  # successors that one state remembers


class RulePosition:
    """The rest of a rule: what is left of `expression`, and then the position `tail`.

    At the end of a rule, `expression` is None. In a literal, `first` is the offset of the next character. In a repetition,
    `first` and `most` are the smallest and largest number of items that may still follow.
    """

    __slots__ = ("expression", "first", "most", "number", "tail")

    def __init__(
        self,
        expression: Expression | None,
        first: int,
        most: int | None,
        tail: "RulePosition | None",
        number: int,
    ) -> None:
        self.expression = expression
        self.first = first
        self.most = most
        self.tail = tail
        self.number = number  # of creation, for a stable order

    def head(self) -> Expression:
        """Return the part of `expression` that is not read yet."""
        one = self.expression
        assert one is not None, "the end of a rule has no expression"
        if isinstance(one, Literal):
            return literal(one.text[self.first :])
        return repeat(one.item, self.first, self.most) if isinstance(one, Repeat) else one


class RuleCall:
    """A call of the rule `rule`, and the positions at which the automaton continues after the call."""

    __slots__ = ("positions", "rule", "state")

    def __init__(self, rule: str, positions: frozenset[RulePosition]) -> None:
        self.rule = rule
        self.positions = positions
        self.state: DState | None = None  # of these positions, once it was needed


class DState:
    """A deterministic state: a set of positions, with its transitions. `final` is whether the current rule may end in this
    state."""

    __slots__ = ("calls", "final", "memo", "positions", "quiet", "ranges", "singles")

    def __init__(self, positions: frozenset[RulePosition]) -> None:
        self.positions = positions
        self.singles: dict[str, list[RulePosition]] = {}  # successors by a single character
        self.ranges: list[tuple[CharClass, RulePosition]] = []
        self.calls: list[RuleCall] = []
        self.final = False
        self.quiet = False  # neither calls nor final: only characters lead on
        self.memo: dict[str, DState | None] = {}


class PushdownAutomaton:
    """The automaton of one grammar.

    The automaton caches the states that it makes, up to a limit. The caches do not change the grammar's language.

    If a grammar is ambiguous, the automaton needs many steps in spite of the caches. A token bucket bounds the steps per
    character: each character that is read adds steps to the bucket, and the automaton takes steps from it. If the bucket has
    too few steps, the automaton raises GrammarRefused.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.rules = dict(grammar.rules)
        self._nullable = nullable_rules(grammar)
        self._empty_items = {  # identities of the repetitions of an item that may be empty
            id(part)
            for body in grammar.rules.values()
            for part in walk(body)
            if isinstance(part, Repeat) and is_nullable(part.item, self._nullable)
        }
        self.end = RulePosition(None, 0, None, None, 0)
        self._items: dict[int, str] = {}  # by identity of such a repetition, the auxiliary rule of its item
        self._count = 0
        self._steps_left = BURST_STEPS
        self._positions: dict[tuple[int, int, int | None, int], RulePosition] = {}
        self._states: dict[frozenset[RulePosition], DState] = {}
        self._starts: dict[str, DState] = {}

    def read(self, characters: int) -> None:
        """Add steps to the token bucket, in proportion to the number of characters that are read."""
        self._steps_left = min(BURST_STEPS, self._steps_left + STEPS_PER_CHARACTER * characters)

    def spend(self, steps: int) -> None:
        """Take steps from the token bucket. Raise GrammarRefused if the bucket has too few."""
        self._steps_left -= steps
        if self._steps_left < 0:
            refuse("the grammar is too ambiguous to follow in time", "the text so far")

    # --- positions --------------------------------------------------------------------------------------------------

    def push(self, expression: Expression, tail: RulePosition) -> RulePosition:
        """Return the position at which `expression` is still to be read, followed by `tail`."""
        if isinstance(expression, Sequence):
            for item in reversed(expression.items):
                tail = self.push(item, tail)
            return tail
        if isinstance(expression, Repeat):
            return self._loop(expression, expression.least, expression.most, tail)
        return self._position(expression, 0, None, tail)

    def _loop(self, one: Repeat, least: int, most: int | None, tail: RulePosition) -> RulePosition:
        if most == 0:
            return tail
        return self._position(one, 0 if id(one) in self._empty_items else least, most, tail)

    def _position(self, one: Expression, first: int, most: int | None, tail: RulePosition) -> RulePosition:
        key = (id(one), first, most, id(tail))
        found = self._positions.get(key)
        if found is None:
            self._count += 1
            found = self._positions[key] = RulePosition(one, first, most, tail, self._count)
        return found

    # --- deterministic states ---------------------------------------------------------------------------------------

    def start(self, rule: str) -> DState:
        """Return the state at the start of a rule."""
        found = self._starts.get(rule)
        if found is None:
            found = self._starts[rule] = self.state(frozenset((self.push(self.rules[rule], self.end),)))
        return found

    def state(self, positions: frozenset[RulePosition]) -> DState:
        """Return the deterministic state with these positions.

        Raise GrammarRefused if there are more than 2,000 positions, or if the token bucket has too few steps.
        """
        found = self._states.get(positions)
        if found is None:
            if len(positions) > MAX_POSITIONS:
                refuse(
                    f"the grammar is ambiguous: more than {MAX_POSITIONS} continuations", "the text so far"
                )
            if len(self._states) >= CACHED_STATES:
                self._forget()
            found = self._states[positions] = DState(positions)
            self._close(found)
        return found

    def _forget(self) -> None:
        """Drop the caches. A state that is still in use stays valid."""
        for state in self._states.values():
            state.memo = {}
        self._states, self._starts, self._positions = {}, {}, {}

    def after(self, call: RuleCall) -> DState:
        """Return the state in which the automaton continues after a call has returned."""
        if call.state is None:
            call.state = self.state(call.positions)
        return call.state

    def union(self, one: DState, other: DState) -> DState:
        """Return the state that has the positions of both states."""
        if other.positions <= one.positions:
            return one
        return self.state(one.positions | other.positions)

    def step(self, state: DState, char: str) -> DState | None:
        """Return the state after `char` is read in `state`, or None if `char` may not follow."""
        try:
            return state.memo[char]
        except KeyError:
            self.spend(len(state.ranges))
        reached = set(state.singles.get(char, ()))
        code = ord(char)
        reached.update(position for group, position in state.ranges if contains(group, code))
        found = self.state(frozenset(reached)) if reached else None
        if len(state.memo) >= CACHED_CHARACTERS:
            state.memo = {}
        state.memo[char] = found
        return found

    def _close(self, state: DState) -> None:
        """Compute the transitions of a state. Follow every path that reads no character."""
        returns: dict[str, set[RulePosition]] = {}
        left, seen = sorted(state.positions, key=lambda position: position.number), set(state.positions)
        while left:
            at = left.pop()
            for position in self._expand(state, at, returns):
                if position not in seen:
                    seen.add(position)
                    left.append(position)
        state.calls = [RuleCall(rule, frozenset(after)) for rule, after in returns.items()]
        state.quiet = not state.final and not state.calls
        self.spend(len(seen))

    def _expand(
        self, state: DState, at: RulePosition, returns: dict[str, set[RulePosition]]
    ) -> Iterable[RulePosition]:
        """Add the transitions of the position `at` to `state`.

        Add the position after each call to `returns`, by the called rule. Return the positions that `at` leads to without
        reading a character.
        """
        one, tail = at.expression, at.tail
        if one is None or tail is None:
            state.final = True
            return ()
        if isinstance(one, Literal):
            after = tail if at.first + 1 == len(one.text) else self._position(one, at.first + 1, None, tail)
            state.singles.setdefault(one.text[at.first], []).append(after)
            return ()
        if isinstance(one, CharClass):
            self._read(state, one, tail)
            return ()
        if isinstance(one, Reference):
            return self._refer(one.name, tail, returns)
        if isinstance(one, Alternation):
            return [self.push(option, tail) for option in one.options]
        assert isinstance(one, Repeat), "a sequence is never a position"
        again = self._loop(one, max(0, at.first - 1), None if at.most is None else at.most - 1, tail)
        skip = (tail,) if at.first == 0 else ()
        if at.most is not None and id(one) in self._empty_items:
            # a call, because an empty item would lead through all counts without a character
            returns.setdefault(self._item_rule(one), set()).add(again)
            return skip
        if isinstance(one.item, CharClass):
            self._read(state, one.item, again)
            return skip
        return (self.push(one.item, again), *skip)

    def _read(self, state: DState, group: CharClass, after: RulePosition) -> None:
        if len(group.ranges) == 1 and group.ranges[0][0] == group.ranges[0][1]:
            state.singles.setdefault(chr(group.ranges[0][0]), []).append(after)
        elif group.ranges:
            state.ranges.append((group, after))

    def _refer(
        self, rule: str, tail: RulePosition, returns: dict[str, set[RulePosition]]
    ) -> tuple[RulePosition, ...]:
        if tail is self.end:
            return (self.push(self.rules[rule], tail),)
        returns.setdefault(rule, set()).add(tail)
        return (tail,) if rule in self._nullable else ()

    def _item_rule(self, one: Repeat) -> str:
        if isinstance(one.item, Reference):
            return one.item.name
        name = self._items.get(id(one))
        if name is None:
            name = self._items[id(one)] = f"item:{len(self._items)}"  # no front end has a colon in a name
            self.rules[name] = one.item
        return name


def contains(group: CharClass, code: int) -> bool:
    """Return whether a character class contains a code point."""
    if group is ANY_CHARACTER:
        return True
    at = bisect_right(group.ranges, (code, 0x110000))
    return at > 0 and group.ranges[at - 1][1] >= code
