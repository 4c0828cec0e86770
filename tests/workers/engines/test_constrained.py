"""Engines that own their logits follow the grammar of a constrained answer."""

import json
from pathlib import Path

import pytest

from events.grammar.constraint import constraint_of
from events.json_types import Json
from events.token_bytes import BUILTIN_FILE, read_token_bytes
from workers.engines.constrained import MATCHERS_KEPT, ConstraintMatchers

TOKENS = {0: b"", 1: b"a", 2: b"b", 3: b"ab", 4: "é".encode()[:1], 5: "é".encode()[1:]}
EOS = 0


def guided(grammar: str) -> Json:
    return {"structured_outputs": {"grammar": grammar}}


def allowed(bits: int) -> set[int]:
    return {token for token in TOKENS if bits >> token & 1}


def test_only_tokens_of_the_grammar_are_allowed_and_the_end_where_it_may_end() -> None:
    follower = ConstraintMatchers(TOKENS, {EOS}).follow(guided('root ::= "ab" "é"?'))
    assert allowed(follower.allowed()) == {1, 3}
    follower.advance(1)
    assert allowed(follower.allowed()) == {2}
    follower.advance(2)
    assert allowed(follower.allowed()) == {EOS, 4}
    follower.advance(4)
    assert allowed(follower.allowed()) == {5}
    follower.advance(5)
    assert allowed(follower.allowed()) == {EOS}
    follower.advance(EOS)
    assert not follower.broken


def test_after_a_token_outside_the_grammar_the_answer_is_no_longer_followed() -> None:
    follower = ConstraintMatchers(TOKENS, {EOS}).follow(guided('root ::= "ab"'))
    follower.advance(2)
    assert follower.broken
    follower.advance(2)


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (guided("root ::= missing"), "is not defined"),
        ({"response_format": {"type": "json_object"}}, "needs the constraint as a grammar"),
        ({"structured_outputs": {"choice": ["a"]}}, "needs the constraint as a grammar"),
    ],
)
def test_a_constraint_that_is_no_grammar_is_refused(constraint: Json, why: str) -> None:
    refusal = ConstraintMatchers(TOKENS, {EOS}).refusal(constraint)
    assert refusal is not None and refusal.startswith("invalid_request: ") and why in refusal


def test_matchers_are_kept_up_to_a_limit_and_each_answer_has_its_own_state() -> None:
    matchers = ConstraintMatchers(TOKENS, {EOS})
    first, second = (matchers.follow(guided('root ::= "ab"')) for _ in range(2))
    first.advance(1)
    assert allowed(second.allowed()) == {1, 3}
    for number in range(2 * MATCHERS_KEPT):
        assert matchers.refusal(guided(f'root ::= "{number}" | "a"')) is None
    assert allowed(first.allowed()) == {2}


def test_the_tokens_of_a_vocabulary_are_read_as_bytes(tmp_path: Path) -> None:
    builtin = read_token_bytes(BUILTIN_FILE)
    assert sorted(builtin[token] for token in range(3, 259)) == [bytes([byte]) for byte in range(256)]
    assert not {0, 1, 2} & builtin.keys()  # special tokens
    unigram = {
        "model": {"vocab": [["<unk>", 0.0], ["<0xE4>", -1.0], ["\u2581so", -2.0]]},
        "added_tokens": [{"id": 0, "special": True, "content": "<unk>"}, {"id": 9, "special": False, "content": "é"}],
    }  # fmt: skip
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(unigram))
    assert read_token_bytes(file) == {1: b"\xe4", 2: b" so", 9: "é".encode()}
    file.write_text('{"model": {}}')
    with pytest.raises(ValueError, match="is no tokenizer"):
        read_token_bytes(file)


def test_a_constraint_of_a_client_becomes_such_a_grammar() -> None:
    grammar = constraint_of({"guided_choice": ["ab", "aé"]}).ebnf
    follower = ConstraintMatchers(TOKENS, {EOS}).follow(guided(grammar))
    assert allowed(follower.allowed()) == {1, 3}
