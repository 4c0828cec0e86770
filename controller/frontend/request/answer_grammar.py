"""The grammar of one constrained answer: what may follow the part that already exists."""

from dataclasses import dataclass, field

from events.grammar.constraint import Constraint
from events.grammar.refusals import TextRejected


@dataclass(slots=True, kw_only=True)
class AnswerGrammar:
    """The constraint of an answer, and the markers of the answer's reasoning.

    A server with a reasoning parser constrains only the text after the reasoning. A server without one constrains the
    whole text.
    """

    constraint: Constraint
    reasoning_start: tuple[str, ...] = ()
    reasoning_end: tuple[str, ...] = ()
    in_reasoning: bool = False  # whether the answer begins inside its reasoning
    # the last text and its result, because a move requests the same one up to three times
    _last: tuple[str, str] | None = field(default=None, repr=False, compare=False)

    def rest(self, text: str) -> str:
        """Return, as EBNF, the grammar of what may follow `text`, the answer so far.

        Raise TextRejected if no permitted answer begins with `text`, and GrammarRefused if the grammar is too
        ambiguous.
        """
        if self._last is None or self._last[0] != text:
            self._last = text, self._compute_rest(text)
        return self._last[1]

    def _compute_rest(self, text: str) -> str:
        try:
            return self.constraint.rest(text)
        except TextRejected:
            if not (self.in_reasoning or text.startswith(self.reasoning_start)):
                raise
            return self.constraint.rest(self._after_reasoning(text))

    def _after_reasoning(self, text: str) -> str:
        """Return the part of a text after its reasoning; "" if the reasoning has not ended."""
        found = ((text.find(end), len(end)) for end in self.reasoning_end)
        at, length = min((one for one in found if one[0] >= 0), default=(len(text), 0))
        return text[at + length :]
