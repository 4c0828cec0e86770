"""Computes the residual of a grammar: what may still follow the text that was read, as a grammar.

The residual is the left quotient of the grammar by that text (Ginsburg 1966). It follows from the state of the recogniser,
which is a set of pairs of a frame and a deterministic state. Each pair contributes the rest of its rule, and then the rests of
its callers' rules.

If a frame has a single caller and is used only once, it is written in place. Any other frame becomes a rule. Frames exist only
for calls that have not returned. So the size of the result grows with the depth of the nesting, not with the length of the text.
"""

from collections import Counter

from events.grammar.automaton import DState, RulePosition
from events.grammar.model import EMPTY, Expression, Grammar, Reference, choice, reachable, sequence
from events.grammar.recogniser import CallFrame, Configuration, State


def residual(state: State) -> Grammar:
    """Return the grammar of all texts that may follow the text so far."""
    return _Residual(state).grammar()


class _Residual:
    def __init__(self, state: State) -> None:
        self._state = state
        self._kept = state.automaton.rules
        self._uses: Counter[CallFrame] = Counter()
        self._names: dict[CallFrame, str] = {}
        self._left: list[CallFrame] = []
        self._taken = 0
        self._count_uses()

    def grammar(self) -> Grammar:
        """Return the residual as a grammar."""
        rules: dict[str, Expression] = {}
        root = self._name("root")
        options = [self._continue(one) for one in self._state.configurations]
        if self._state.accepting:
            options.append(EMPTY)
        rules[root] = choice(*options)
        while self._left:
            frame = self._left.pop()
            rules[self._names[frame]] = self._callers(frame)
        return reachable(Grammar({**rules, **self._kept}, root))

    def _count_uses(self) -> None:
        """Count the uses of each frame: by callees that return to the frame, and by pairs of the state."""
        left = [frame for frame, _ in self._state.configurations]
        self._uses.update(left)
        seen = set(left)
        left = list(seen)
        while left:
            callers = left.pop().callers
            self._uses.update(list(callers))
            left.extend(caller for caller in callers if caller not in seen)
            seen.update(callers)

    def _continue(self, configuration: Configuration) -> Expression:
        """Return an expression for what may follow in one pair of a frame and a state.

        The expression consists of the rest of the pair's rule, and then the rests of the callers' rules.
        """
        frame, state = configuration
        parts: list[Expression] = [rest(state)]
        while len(frame.callers) == 1 and self._uses[frame] == 1:
            ((frame, state),) = frame.callers.items()
            parts.append(rest(state))
        if frame is not self._state.outermost:
            parts.append(self._reference(frame))
        return sequence(*parts)

    def _callers(self, frame: CallFrame) -> Expression:
        return choice(*(self._continue(caller) for caller in frame.callers.items()))

    def _reference(self, frame: CallFrame) -> Reference:
        if frame not in self._names:
            self._names[frame] = self._name("after")
            self._left.append(frame)
        return Reference(self._names[frame])

    def _name(self, base: str) -> str:
        """Return a name that no rule has."""
        while True:
            name = base if base == "root" and not self._taken else f"{base}-{self._taken}"
            self._taken += 1
            if name not in self._kept:
                return name


def rest(state: DState) -> Expression:
    """Return an expression for the rest of the rule at `state`.

    A tail that all positions of the state share is written once.
    """
    positions = sorted(state.positions, key=lambda position: position.number)
    chains = [_chain(position) for position in positions]
    shared = 0
    while (
        all(len(chain) > shared for chain in chains)
        and len({id(chain[-1 - shared]) for chain in chains}) == 1
    ):
        shared += 1
    common = [position.head() for position in chains[0][len(chains[0]) - shared :]]
    options = [sequence(*(position.head() for position in chain[: len(chain) - shared])) for chain in chains]
    return sequence(choice(*options), *common)


def _chain(position: RulePosition) -> list[RulePosition]:
    chain = []
    at: RulePosition | None = position
    while at is not None and at.expression is not None:
        chain.append(at)
        at = at.tail
    return chain
