"""The front ends of texts: EBNF, GBNF, regular expressions, choices."""

import re

import pytest
from grammar_samples import CHOICES, COUNTRIES, EBNF, REGEXES
from hypothesis import given, settings
from hypothesis import strategies as st

from events.grammar.choices import grammar_of_choice
from events.grammar.ebnf import parse_ebnf
from events.grammar.gbnf import parse_gbnf
from events.grammar.model import Grammar
from events.grammar.recogniser import start
from events.grammar.refusals import GrammarRefused, TextRejected
from events.grammar.regex import Flavour, grammar_of_regex, parse_json_pattern, parse_regex


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether a whole text is in the grammar."""
    try:
        return start(grammar).advance(text).accepting
    except TextRejected:
        return False


def matches(pattern: str, text: str, flavour: Flavour = Flavour.CONVERTED) -> bool:
    """Return whether a pattern matches a whole text."""
    return accepts(Grammar({"root": parse_regex(pattern, flavour, "here")}), text)


@pytest.mark.parametrize("text", EBNF)
def test_each_sample_of_ebnf_is_parsed(text: str) -> None:
    assert start(parse_ebnf(text)).configurations


def test_ebnf_of_several_lines_with_comments_and_look_aheads() -> None:
    grammar = parse_ebnf('# c\nroot ::= a |\n  b # d\na::="x" (= "y")\nb ::= [^\\]\\\\-] "\\u65e5" {2}\r\n')
    assert accepts(grammar, "x") and accepts(grammar, "a日日") and not accepts(grammar, "]日日")


def test_another_root_and_a_range_of_hyphens() -> None:
    assert accepts(parse_ebnf("start ::= [--/] [a-]\nroot ::= [b]", "start"), ".-")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root ::= a", "the rule a is not defined, at line 1, column 10"),
        ('root ::= "a', "a literal or a class has no end, at line 1, column 12"),
        ("root ::= [a\n]", "has no end"),
        ('root ::= "\\q"', "unknown escape"),
        ("root ::= [z-a]", "a range of a class is reversed"),
        ("root ::= [\\d]", "unknown escape"),
        ('root ::= "a" "b" ::= "c"', "needs a name before it"),
        ('root ::= "a" x ::= "c"', "at the start of a line"),
        ("::= [a]", "needs a name before it"),
        ('root ::= "a"\nroot ::= "b"', "the rule root is defined twice, at line 2, column 1"),
        ('x ::= "a"', "there is no rule root"),
        ('root ::= ("a"', "expected ), found end"),
        ("root ::= ", "expected an element, found end"),
        ('root ::= "a"{3,2}', "bounds 3 and 2"),
        ('root ::= "a"{-1}', "expected number"),
        ('root ::= "a"{2000000}', "a bound above 1000000"),
        ("root ::= Token(1)", "depends on the tokeniser"),
        ("root ::= ExcludeToken(1)", "depends on the tokeniser"),
        ("root ::= TokenTagDispatch((1, root))", "depends on the tokeniser"),
        ('root ::= Substring("a b")', "Substring is not supported"),
        ('root ::= Regex("a", flags="i")', "the argument flags"),
        ('root[max_tokens=5] ::= "a"', "a rule has attributes"),
        ('root[lazy] ::= "a"', "a rule has attributes"),
        ("root ::= root", "no text is in the grammar"),
        ('root ::= "a" root', "no text is in the grammar"),
        ('root ::= TagDispatch(("", root))', "a trigger or an excluded text is empty"),
        ('root ::= TagDispatch(("ab", x), excludes=("a"))\nx ::= "c"', "begins a trigger"),
        ("root ::= %", "unexpected character '%', at line 1, column 10"),
        ("", "there is no rule root"),
    ],
)
def test_ebnf_that_is_not_valid_or_not_supported_is_refused(text: str, why: str) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(why)):
        parse_ebnf(text)


def test_gbnf_of_llama_cpp() -> None:
    grammar = parse_gbnf('root ::= (item |\n "" ) # c\n\nitem ::= (. [^\\x41-Z\\]] "\\U0001F600"{1,2} | )\n')
    assert accepts(grammar, "") and accepts(grammar, "Aa\U0001f600") and not accepts(grammar, "AZ\U0001f600")
    assert accepts(parse_gbnf('root ::= "a"\nroot ::= "b"'), "b")
    assert accepts(parse_gbnf("root ::= [a]{0,2001}"), "a" * 2500)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root ::= <think>", "a token literal depends on the tokeniser, at line 1, column 10"),
        ("root ::= !<[5]> ", "a token literal"),
        ('root ::= root "a" | "b"', "begins with itself"),
        ('root ::= x\nx ::= "a"? root | "b"', "begins with itself"),
        ('root ::= "a"{2001}', "refuses more than 2000 repetitions"),
        ('root ::= ("a"{0,50} "b"){0,60}', "so many repetitions"),
        ('root ::= "a"{2000}', "so many repetitions"),
        ('root ::= "\\q"', "unknown escape"),
        ("root ::= [", "has no end"),
        ("root ::= []", "a class is empty"),
        ('root ::= ("a"', "expected )"),
        ('root ::= "a" ) ', "expected the end of the line"),
        ("root ::= *", "nothing to repeat"),
        ('root := "a"', "expected ::="),
        ("_a ::= root", "expected a name"),
        ('x ::= "a"', "there is no rule root"),
        ('root ::= "a"{x}', "expected a number"),
        ("root ::= y", "a rule is used but not defined, at rule y"),
    ],
)
def test_gbnf_that_is_not_valid_or_not_supported_is_refused(text: str, why: str) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(why)):
        parse_gbnf(text)


@pytest.mark.parametrize("pattern", REGEXES)
def test_each_sample_of_a_regular_expression_is_parsed(pattern: str) -> None:
    assert start(grammar_of_regex(pattern)).automaton


PARTS = st.sampled_from(
    ["a", "b", "[ab]", "[^a]", ".", "\\w", "(a|b)", "(ab)?", "a*", "b+", "(a|bb){1,2}", "|", "[^b]{2}"]
)


@settings(deadline=None)
@given(st.lists(PARTS, max_size=5).map("".join), st.text("ab", max_size=5))
def test_patterns_match_as_in_python(pattern: str, text: str) -> None:
    assert matches(pattern, text) == (re.fullmatch(pattern, text, re.DOTALL) is not None)
    assert matches(pattern, text, Flavour.AUTOMATON) == (re.fullmatch(pattern, text, re.DOTALL) is not None)


def test_what_both_readers_of_xgrammar_do_differently() -> None:
    assert matches(r"[\^a]", "b") and not matches(r"[\^a]", "a")  # the conversion loses the backslash
    assert matches(r"[\^a]", "a", Flavour.AUTOMATON) and not matches(r"[\^a]", "b", Flavour.AUTOMATON)
    assert matches("(?i)aB", "Ab", Flavour.AUTOMATON)
    assert matches("a(?=x)b", "ab", Flavour.AUTOMATON)
    assert matches("]", "]")


def test_a_pattern_of_a_json_string_has_no_quotes_unless_it_must() -> None:
    anything = Grammar({"root": parse_json_pattern(r"a[^b]\S.", "here")})
    assert accepts(anything, "acd\x7f") and not accepts(anything, 'a"dd') and not accepts(anything, "acd\n")
    assert accepts(Grammar({"root": parse_json_pattern('a"', "here")}), 'a"')
    assert accepts(
        Grammar({"root": parse_json_pattern("é.", "here")}), 'é"'
    )  # converted, because it is not ASCII


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a)\1", "a back reference"),
        (r"\k<n>", "a back reference"),
        (r"\bfoo", "a word boundary"),
        (r"\p{L}", "a Unicode property"),
        ("a(?=b)", "unknown modifier"),
        ("(?i)a", "unknown modifier"),
        ("(?<=a)b", "unknown modifier"),
        ("*a", "nothing to repeat"),
        ("a**", "two repetitions follow each other"),
        ("a{,3}", "the bounds of a repetition are not valid"),
        ("a{3,2}", "reversed"),
        ("a{9999999999}", "too large"),
        ("(a", "a parenthesis is not closed"),
        ("a)", "closed that was not opened"),
        ("[]a]", "a class is empty"),
        ("[a", "a class has no end"),
        ("[z-a]", "a range of a class is reversed"),
        ("a\\", "an escape is not finished"),
        (r"\u{110000}", "beyond Unicode"),
        (r"\xg", "an escape is not valid"),
        ("a\0", "a NUL character"),
        ("a" * 4001, "more than 4000 characters"),
    ],
)
def test_patterns_that_are_not_supported_are_refused(pattern: str, why: str) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(why)):
        grammar_of_regex(pattern)


@pytest.mark.parametrize(
    "pattern", ["a]", "[", "[a", "(?=", "(?!a", r"[z-a]", r"\x4", r"\c1", "[\\d-a\\]", "(?<n", "a{2,1}"]
)
def test_an_automaton_refuses_what_it_cannot_read(pattern: str) -> None:
    with pytest.raises(GrammarRefused):
        parse_regex(pattern, Flavour.AUTOMATON, "here")


@pytest.mark.parametrize("texts", CHOICES)
def test_a_choice_accepts_its_texts_only(texts: list[str]) -> None:
    grammar = grammar_of_choice(texts)
    assert all(accepts(grammar, text) for text in texts)
    assert not any(accepts(grammar, text[:-1]) for text in texts if text[:-1] not in texts)


def test_many_texts_with_one_beginning_share_their_positions() -> None:
    state = start(grammar_of_choice([*COUNTRIES, *(f"country x{number}" for number in range(4000))]))
    (configuration,) = state.advance("country x").configurations
    assert len(configuration[1].positions) < 12


@pytest.mark.parametrize("texts", [[], [1], ["a" * 200_001]])
def test_a_choice_that_is_not_valid_is_refused(texts: list[str]) -> None:
    with pytest.raises(GrammarRefused):
        grammar_of_choice(texts)
