"""The lower limit of a text's tokens from its length: never too high, and close enough to be useful."""

import unicodedata
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_segment_cache import ADDED, CUT, SNIPPETS, WHOLE, byte_level, flagged, llama_3, with_added
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from controller.frontend.openai.text.token_count_bound import BLANKS, COMPOSED_MAX
from controller.frontend.openai.text.tokenizer import Tokens

COMPOSED = ["\u03b1\u0313\u0300\u0345", "e\u0301", "\u1112\u1161\u11ab", "\u212b", "\u1f82", "\ufdfa", "İ"]
RUNS = st.tuples(st.sampled_from([*SNIPPETS, *COMPOSED, *BLANKS]) | st.text(max_size=3), st.integers(1, 60))
TEXTS = st.lists(RUNS, max_size=6).map(lambda runs: "".join(snippet * times for snippet, times in runs))


def normalized(*steps: Any) -> Tokenizer:
    tokenizer = with_added(byte_level())
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def bytes_to_fall_back_to(unigram: bool) -> Tokenizer:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "ab", "▁a"]
    if unigram:
        return Tokenizer(models.Unigram([(name, -float(len(name))) for name in names], 0, True))
    vocab = {name: place for place, name in enumerate(names)} | {"b": len(names)}
    merges = [("a", "b"), ("▁", "a")]
    return Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )


def parted(part: Any) -> Tokenizer:
    tokenizer = bytes_to_fall_back_to(unigram=False)
    tokenizer.pre_tokenizer = part
    return tokenizer


def unfused() -> Tokenizer:
    return Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1, "aa": 2}, merges=[("a", "a")], unk_token="<unk>"))


BOUNDED = {
    **{name: CUT[name] for name in ("builtin", "byte level", "byte level without words", "llama 3", "roberta")},
    **{name: WHOLE[name] for name in ("takes spaces before", "takes spaces behind", "only between words", "padded")},
    "said twice": WHOLE["said twice"],
    "takes spaces on both sides": flagged(lstrip=True, rstrip=True),
    "composed": normalized(normalizers.NFKC(), normalizers.Lowercase()),
    "decomposed": normalized(normalizers.NFKD(), normalizers.NFC()),
    "replaced by less": normalized(normalizers.Replace("ab", "x"), normalizers.Prepend("▁")),
    "byte-level normalizer": normalized(normalizers.ByteLevel()),
    "bytes to fall back to": bytes_to_fall_back_to(unigram=False),
    "bytes to fall back to, unigram": bytes_to_fall_back_to(unigram=True),
    "unknown ones apart": unfused(),
}  # fmt: skip
UNBOUNDED = {
    **{name: CUT[name] for name in ("none added", "llama 2", "metaspace always", "bert", "unigram")},
    "truncated": WHOLE["truncated"],
    "strips": normalized(normalizers.Strip()),
    "strips accents": normalized(normalizers.NFD(), normalizers.StripAccents()),
    "replaced by nothing": normalized(normalizers.Replace("a", "")),
    "replaced by a pattern": normalized(normalizers.Replace(Regex("a+"), "a")),
    "removes": parted(pre_tokenizers.Split("a", "removed")),
    "removes punctuation": parted(pre_tokenizers.Punctuation("removed")),
    "removes a letter": parted(pre_tokenizers.CharDelimiterSplit("a")),
}
ALL = {**CUT, **WHOLE, **BOUNDED, **UNBOUNDED}


@cache
def tokens_of(name: str) -> Tokens:
    return Tokens(ALL[name], None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@given(text=TEXTS)
@example(text="ab" * 3000)
@example(text=" " * 3_000 + "<|user|>" + " " * 3_000)
@example(text="".join(one.content for one in ADDED) * 20)
@settings(max_examples=40, deadline=None)
def test_the_limit_never_exceeds_the_number_of_tokens(name: str, text: str) -> None:
    tokens = tokens_of(name)
    exact = len(tokens.encode(text, special=False))
    assert tokens.tokens_min(text, 10**9) <= exact
    assert tokens.tokens_min(text, exact) <= exact, "a text that fits is not refused"


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_that_is_much_too_long_is_recognized(name: str) -> None:
    tokens = Tokens(BOUNDED[name], None)
    assert tokens.tokens_min("a" * 2000 * 15 * 4, 2000) >= 2000


@pytest.mark.parametrize("name", UNBOUNDED)
def test_there_is_no_limit_if_one_token_may_be_any_number_of_characters(name: str) -> None:
    assert tokens_of(name).tokens_min("a" * 10**6, 10) == 0


def test_blanks_do_not_count_if_they_may_be_dropped() -> None:
    tokens = Tokens(parted(pre_tokenizers.WhitespaceSplit()), None)
    assert tokens.tokens_min(" " * 10**6 + "a" * 100, 10) <= 100
    assert tokens.tokens_min(" " * 10**6 + "a" * 1000, 10) > 10
    assert len(tokens.encode(" " * 10**6 + "a" * 100, special=False)) == 100


def test_the_builtin_tokenizers_reach_is_its_longest_token() -> None:
    tokens = tokens_of("builtin")
    assert max(map(len, tokens.table.bytes if tokens.table else [])) == 12
    assert tokens.tokens_min("a" * 1200, 10**9) == 100


def test_composition_leaves_ascii_unchanged() -> None:
    tokens = Tokens(llama_3(), None)
    assert tokens.tokens_min("a" * 1200, 10**9) == 100
    assert tokens.tokens_min("é" * 1200, 10**9) == 1200 / 12 / COMPOSED_MAX


def test_no_character_is_composed_of_more_than_the_limit() -> None:
    every = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert max(len(unicodedata.normalize("NFD", char)) for char in every) == COMPOSED_MAX


def test_every_blank_is_known() -> None:
    assert set(BLANKS) == {chr(code) for code in range(0x110000) if chr(code).isspace()}


def test_a_vocabulary_of_added_tokens_only_loads() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={}, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>"])
    assert tokenizer.get_vocab(with_added_tokens=False) == {}
    assert Tokens(tokenizer, None).encode("<unk>", special=True) == [0]
