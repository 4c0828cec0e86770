"""Incremental recogniser of a grammar: the state after a text, what may follow, where it may end.

A state is a set of pairs. Each pair has a return stack and a deterministic state of the automaton. The return stacks share
their parts: a *frame* is one call, with one or more callers (a graph-structured stack, Tomita 1985; Scott and Johnstone 2010).
All calls of a rule at the same character share a frame, so that left recursion needs finitely many frames. A frame never
changes after the character at which it was created, so states are immutable, and an earlier state stays usable.

A character inside a string or a number takes one lookup. At a boundary, each call and return takes some more. If a grammar is
too ambiguous, its automaton refuses it: a state has more than `MAX_POSITIONS` positions, or a text needs too many steps.
"""

from collections.abc import Iterable

from events.grammar.automaton import DState, PushdownAutomaton
from events.grammar.model import Grammar, check
from events.grammar.refusals import TextRejected


class CallFrame:
    """One call of a rule: its callers, each with the state after the return. The outermost frame has no caller."""

    __slots__ = ("callers",)

    def __init__(self) -> None:
        self.callers: dict[CallFrame, DState] = {}


Configuration = tuple[CallFrame, DState]


class State:
    """The state of a recogniser after a text. It is immutable, and `advance` returns a new one."""

    __slots__ = ("accepting", "automaton", "configurations", "outermost")

    def __init__(
        self,
        automaton: PushdownAutomaton,
        outermost: CallFrame,
        configurations: tuple[Configuration, ...],
        accepting: bool,
    ) -> None:
        self.automaton = automaton
        self.outermost = outermost
        self.configurations = configurations
        self.accepting = accepting  # whether the text so far is in the grammar

    def advance(self, text: str) -> "State":
        """Return the state after `text` is read in this state.

        Raise TextRejected if no text of the grammar continues with `text`. Raise GrammarRefused if the grammar is too
        ambiguous.
        """
        offset, state = self._advance(text)
        if offset < len(text):
            raise TextRejected(offset)
        return state

    def allowed(self, text: str) -> bool:
        """Return whether some text of the grammar continues with this text."""
        return self._advance(text)[0] == len(text)

    def _advance(self, text: str) -> tuple[int, "State"]:
        """Return how many of the characters the grammar allows, and the state after these characters."""
        automaton, configurations, accepting = self.automaton, self.configurations, self.accepting
        automaton.read(len(text))
        for offset, char in enumerate(text):
            if len(configurations) == 1:  # the usual case, inside a string or a number
                frame, state = configurations[0]
                after = state.memo[char] if char in state.memo else automaton.step(state, char)
                if after is None:
                    return offset, self._copy(configurations, accepting)
                if after.quiet:
                    configurations, accepting = ((frame, after),), False
                    continue
                reached: list[Configuration] = [(frame, after)]
            else:
                steps = ((frame, automaton.step(state, char)) for frame, state in configurations)
                reached = [(frame, after) for frame, after in steps if after is not None]
                if not reached:
                    return offset, self._copy(configurations, accepting)
            configurations, accepting = close(automaton, self.outermost, reached)
        return len(text), self._copy(configurations, accepting)

    def _copy(self, configurations: tuple[Configuration, ...], accepting: bool) -> "State":
        return State(self.automaton, self.outermost, configurations, accepting)


def close(
    automaton: PushdownAutomaton, outermost: CallFrame, reached: Iterable[Configuration]
) -> tuple[tuple[Configuration, ...], bool]:
    """Follow all calls and returns that read no character, from `reached` (pairs of a frame and a state).

    Return the pairs that can read a character, and whether the text may end here. Raise GrammarRefused if the grammar is too
    ambiguous.
    """
    states: dict[CallFrame, DState] = {}
    called: dict[str, CallFrame] = {}
    returned: set[CallFrame] = set()
    left = list(reached)
    while left:
        frame, state = left.pop()
        known = states.get(frame)
        if known is not None:
            state = automaton.union(known, state)
            if state is known:
                continue
        states[frame] = state
        automaton.spend(1 + len(state.calls))
        if state.final and frame not in returned:
            returned.add(frame)
            left.extend(frame.callers.items())
            automaton.spend(len(frame.callers))
        for call in state.calls:
            callee = called.get(call.rule)
            if callee is None:
                callee = called[call.rule] = CallFrame()
                left.append((callee, automaton.start(call.rule)))
            callee.callers[frame] = automaton.after(call)  # at least what it was: a frame's state only grows
    live = tuple((frame, state) for frame, state in states.items() if state.singles or state.ranges)
    return live, outermost in returned


def start(grammar: Grammar) -> State:
    """Return the state before any text. Raise GrammarRefused if the grammar is too large or derives no text."""
    automaton = PushdownAutomaton(check(grammar))
    return begin(automaton)


def begin(automaton: PushdownAutomaton) -> State:
    """Return the state before any text. Several texts can use the same automaton."""
    outermost = CallFrame()
    configurations, accepting = close(
        automaton, outermost, [(outermost, automaton.start(automaton.grammar.root))]
    )
    return State(automaton, outermost, configurations, accepting)
