"""The token matcher against the recogniser, token by token, with tokens that end inside a character."""

import random
from collections.abc import Iterator

import pytest
from grammar_samples import EBNF, PERSON, SCHEMAS
from hypothesis import given, settings
from hypothesis import strategies as st

from events.grammar.ebnf import parse_ebnf
from events.grammar.json_schema import grammar_of_json_schema
from events.grammar.refusals import TextRejected
from events.grammar.token_matcher import TokenMatcher
from events.grammar.utf8 import Utf8State, completions, split
from events.grammar.vocabulary import TokenVocabulary

WORDS = (
    '{"', '"}', '":', '": "', '",', ', "', "}}", "]]", '"]', "[{", "true", "null", "tr", "name", "age", "é", "日本", "😀",
    "  ", "\n ", "0.", "12", "-1", "\\n", "\\u00", "abc", '"name": "', 'a","', "} ", "x1", "(", ")", "+", "ab", "aab",
)  # fmt: skip
STOP = 1000
TOKENS = {
    **{byte: bytes([byte]) for byte in range(256)},
    **{300 + at: word.encode() for at, word in enumerate(WORDS)},
    400: "😀".encode()[:2], 401: "😀".encode()[2:], 402: "日".encode()[:2], 403: "é".encode()[1:] + b'"', 404: b"a\xc3",
    405: b"\xff", 406: b"a\xff", 407: b"",
}  # fmt: skip
VOCABULARY = TokenVocabulary(TOKENS, [STOP])


def walk(matcher: TokenMatcher, chance: random.Random, steps: int) -> Iterator[tuple[Utf8State, list[int]]]:
    """Yield the states and the allowed tokens of a random text."""
    state = matcher.start()
    for _ in range(steps):
        allowed = matcher.allowed_tokens(state)
        yield state, allowed
        following = [token for token in allowed if token != STOP]
        if not following or (STOP in allowed and chance.random() < 0.2):
            return
        longer = [token for token in following if len(TOKENS[token]) > 1]
        state = matcher.advance(
            state, chance.choice(longer if longer and chance.random() < 0.7 else following)
        )


def one_by_one(state: Utf8State) -> list[int]:
    """Return the allowed tokens, each checked alone."""
    found = [token for token, data in TOKENS.items() if data and state.allowed(data)]
    return sorted([*found, STOP] if state.accepting else found)


@pytest.mark.parametrize("sample", range(0, len(SCHEMAS), 4))
def test_the_allowed_tokens_of_a_schema(sample: int) -> None:
    matcher = TokenMatcher(grammar_of_json_schema(SCHEMAS[sample]), VOCABULARY)
    for state, allowed in walk(matcher, random.Random(sample), 25):
        assert allowed == one_by_one(state)


@pytest.mark.parametrize("text", EBNF)
def test_the_allowed_tokens_of_a_grammar(text: str) -> None:
    matcher = TokenMatcher(parse_ebnf(text), VOCABULARY)
    for seed in range(3):
        for state, allowed in walk(matcher, random.Random(seed), 15):
            assert allowed == one_by_one(state)


def test_a_token_may_end_inside_a_character() -> None:
    matcher = TokenMatcher(parse_ebnf('root ::= [è-ê] "x"'), VOCABULARY)
    state = matcher.advance(matcher.start(), 0xC3)
    assert state.pending == b"\xc3" and not state.accepting
    assert [TOKENS[token] for token in matcher.allowed_tokens(state)] == [b"\xa8", b"\xa9", b"\xaa"]
    assert matcher.advance(state, 0xA9).state.allowed("x")
    with pytest.raises(TextRejected):
        matcher.advance(state, 0xAB)


def test_stop_tokens_and_unknown_tokens() -> None:
    matcher = TokenMatcher(parse_ebnf('root ::= "a"'), VOCABULARY)
    state = matcher.start()
    for token in (STOP, 5000, 407, ord("b")):
        with pytest.raises(TextRejected):
            matcher.advance(state, token)
    ended = matcher.advance(state, ord("a"))
    assert matcher.allowed_tokens(ended) == [STOP]
    assert matcher.advance(ended, STOP) == ended


def test_bits_and_numbers_agree() -> None:
    matcher = TokenMatcher(grammar_of_json_schema(PERSON), VOCABULARY)
    state = matcher.start()
    assert matcher.allowed(state) == sum(1 << token for token in matcher.allowed_tokens(state))


@pytest.mark.slow
def test_the_caches_of_many_states_are_bounded() -> None:
    schema = {"type": "string", "maxLength": 30_000}
    matcher = TokenMatcher(
        grammar_of_json_schema(schema), TokenVocabulary({1: b"x", 2: b'"', 3: b"a"}, [STOP])
    )
    state = matcher.advance(matcher.start(), 2)
    for _ in range(5_100):  # more than the matcher remembers
        assert matcher.allowed_tokens(state) == [1, 2, 3]
        state = matcher.advance(state, 1)
    state = state.advance(b"x" * 22_000)  # more than the automaton remembers
    state = state.advance("".join(map(chr, range(0x4E00, 0x4E00 + 1_200))).encode())
    assert matcher.allowed_tokens(state) == [1, 2, 3]
    assert matcher.allowed_tokens(matcher.advance(state, 2)) == [STOP]


@settings(deadline=None)
@given(st.text(), st.integers(0, 3))
def test_bytes_are_split_at_the_last_whole_character(text: str, cut: int) -> None:
    data = text.encode("utf-8", "surrogatepass")
    data = data[: len(data) - cut] if cut else data
    whole, pending = split(data)
    assert whole.encode("utf-8", "surrogatepass") + pending == data and len(pending) < 4
    assert text.startswith(whole)
    if pending:
        bounds = completions(pending)
        assert bounds and bounds[0] <= ord(text[len(whole)]) <= bounds[1]


@pytest.mark.parametrize("data", [b"\x80", b"a\xffb", b"\xc0\x80x", b"\xf4\x90\x80\x80", b"\xe0\x80\x80"])
def test_bytes_that_are_not_utf8_are_rejected(data: bytes) -> None:
    with pytest.raises(TextRejected):
        split(data)
    begun = TokenMatcher(parse_ebnf("root ::= [a-\\U0010ffff]*"), VOCABULARY).start()
    assert not begun.allowed(data)


@pytest.mark.parametrize("pending", [b"\xc1", b"\xff", b"\xf5", b"\xe0\x80", b"\xf4\x90", b"\xe2a"])
def test_bytes_that_begin_no_character(pending: bytes) -> None:
    assert completions(pending) is None
