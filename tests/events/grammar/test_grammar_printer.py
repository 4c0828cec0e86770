"""Printed grammars are read back with the same language, in both dialects."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_oracle import grammars, language

from events.grammar.ebnf import parse_ebnf
from events.grammar.gbnf import parse_gbnf
from events.grammar.model import CharClass, Grammar, Reference, Repeat, characters, choice, literal, sequence
from events.grammar.printer import print_class, print_literal, to_ebnf, to_gbnf
from events.grammar.recogniser import start
from events.grammar.refusals import GrammarRefused

any_text = st.text(st.characters(), max_size=8)
ranges = st.lists(
    st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)).map(lambda pair: tuple(sorted(pair)))
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(grammars)
def test_printed_grammars_have_the_same_language(grammar: Grammar) -> None:
    wanted = language(grammar, 4)
    assert language(parse_ebnf(to_ebnf(grammar)), 4) == wanted
    try:
        read = parse_gbnf(to_gbnf(grammar))
    except GrammarRefused as refused:
        assert "begins with itself" in str(refused) or "nothing to repeat" in str(refused)
    else:
        assert language(read, 4) == wanted


@given(any_text)
def test_literals_are_read_back(text: str) -> None:
    grammar = Grammar({"root": literal(text)})
    assert parse_ebnf(to_ebnf(grammar)) == grammar
    assert parse_gbnf(to_gbnf(grammar)) == grammar


@given(ranges)
def test_classes_are_read_back(ranges: list[tuple[int, int]]) -> None:
    group = characters(ranges)
    if group.ranges and not (len(group.ranges) == 1 and group.ranges[0][0] == group.ranges[0][1]):
        grammar = Grammar({"root": group})
        assert parse_ebnf(to_ebnf(grammar)) == grammar
        assert parse_gbnf(to_gbnf(grammar)) == grammar


def test_characters_with_a_meaning_are_escaped() -> None:
    assert print_literal('a"\\\n\t日\U0001f600') == r'"a\"\\\n\t\u65e5\U0001f600"'
    assert print_class(characters([(45, 45), (93, 94), (97, 99)])) == r"[\u002d\]\u005ea-c]"
    assert print_class(characters([(34, 34)], negated=True)) == '[^"]'


def test_names_are_valid_in_both_dialects_and_unique() -> None:
    names = ["Root_1", "root 1", "1", "true", "Token", "é"]
    rules = {"start": sequence(*map(Reference, names)), **{name: literal(name) for name in names}}
    printed = to_ebnf(Grammar(rules, "start"))
    assert printed.startswith("root ::= root-1 root-1-1 r1 true-1 token-1 r\n")
    assert start(parse_gbnf(printed)).advance("".join(names)).accepting


def test_a_class_of_nothing_is_printable() -> None:
    grammar = Grammar({"root": choice(literal("a"), sequence(literal("b"), CharClass(())))})
    assert start(parse_ebnf(to_ebnf(grammar))).allowed("b")


def test_a_large_repetition_is_refused_for_llama_cpp_only() -> None:
    grammar = Grammar({"root": Repeat(literal("a"), 0, 2000)})
    assert "{0,2000}" in to_ebnf(grammar)
    with pytest.raises(GrammarRefused, match=r"llama\.cpp has no repetition of 2000 or more"):
        to_gbnf(grammar)


def test_a_group_with_bounds_is_a_rule_for_llama_cpp() -> None:
    grammar = Grammar({"root": Repeat(choice(literal("a"), literal("bc")), 2, 1500)})
    assert to_gbnf(grammar) == 'root ::= item{2,1500}\nitem ::= "a" | "bc"\n'


def test_a_printed_grammar_has_a_largest_size() -> None:
    grammar = Grammar({"root": literal("\U0001f600" * 150_000)})
    with pytest.raises(GrammarRefused, match="more than 1000000 characters"):
        to_ebnf(grammar)
