"""The grammar of the rest of one answer, with and without reasoning before the constrained text."""

from typing import Any

import pytest

from controller.frontend.request.answer_grammar import AnswerGrammar
from events.grammar.constraint import constraint_of
from events.grammar.refusals import TextRejected

CONSTRAINT = constraint_of({"guided_regex": "ab|cd"})
MARKERS: dict[str, Any] = {"reasoning_start": ("<think>",), "reasoning_end": ("</think>", "[/THINK]")}


def test_without_reasoning_the_whole_text_is_constrained() -> None:
    grammar = AnswerGrammar(constraint=CONSTRAINT)
    assert grammar.rest("") == CONSTRAINT.ebnf
    assert grammar.rest("a") == CONSTRAINT.rest("a") != CONSTRAINT.rest("c")
    with pytest.raises(TextRejected):
        grammar.rest("<think>a")


@pytest.mark.parametrize(
    ("text", "constrained"),
    [
        ("<think>why", ""),
        ("<think>why</think>", ""),
        ("<think>why</think>a", "a"),
        ("<think>why[/THINK]c</think>", None),  # the first end counts
        ("a", "a"),  # a server without a reasoning parser constrains from the start
    ],
)
def test_with_reasoning_the_text_after_it_is_constrained(text: str, constrained: str | None) -> None:
    grammar = AnswerGrammar(constraint=CONSTRAINT, **MARKERS)
    if constrained is None:
        with pytest.raises(TextRejected):
            grammar.rest(text)
    else:
        assert grammar.rest(text) == CONSTRAINT.rest(constrained)


def test_an_answer_may_begin_inside_its_reasoning() -> None:
    assert AnswerGrammar(constraint=CONSTRAINT, in_reasoning=True, **MARKERS).rest("why") == CONSTRAINT.ebnf
    with pytest.raises(TextRejected):
        AnswerGrammar(constraint=CONSTRAINT, **MARKERS).rest("why")
