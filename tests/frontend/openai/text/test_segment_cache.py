"""A text tokenized in segments, most of them cached, has the same tokens as when tokenized whole."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from controller.frontend.openai.completion import read_prompts
from controller.frontend.openai.intake import Intake
from controller.frontend.openai.request_parser import parse_completion, read_chat
from controller.frontend.openai.text.chat_templates import ChatTemplate
from controller.frontend.openai.text.long_texts import LONG_TEXT
from controller.frontend.openai.text.segment_cache import (
    CUTS_MAX,
    KEPT_BYTES,
    SEGMENT_SHARE,
    TEXT_MAX,
    SegmentCache,
)
from controller.frontend.openai.text.tokenizer import BUILTIN, Tokens, load_tokenizer
from controller.frontend.settings import FrontendSettings
from events.token_bytes import BUILTIN_FILE

THREADS = Intake(FrontendSettings()).long_texts
ADDED = [
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("<s>a", special=True, normalized=False),  # the longest match counts
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("|>", special=False, normalized=False),
    AddedToken("\n\n", special=False, normalized=False),
    AddedToken("  ", special=False, normalized=False),
    AddedToken("é", special=False, normalized=False),
    AddedToken("Said", special=False, normalized=True),  # matched in the normalized text
    AddedToken("im", special=True, normalized=True),
]
LETTERS = [
    "a",
    "b",
    "é",
    "A",
    "x",
    "s",
    "i",
    "m",
    "<",
    ">",
    "|",
    "_",
    "\n",
    " ",
    "▁",
    "你",
    "😀",
    "e",
    "\u0301",
    "\t",
    "\u2028",
]
SNIPPETS = [
    *(one.content for one in ADDED), *LETTERS, "<unk>", "</s>", "<|im_", "start|>", "<s", "<|im_start|", "said", "SAID",
    "hello world", " hello", "user\n", "  a", " ", "   ", "im_x", "Saida", "ab" * 20, "\0",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=3), max_size=14).map("".join)


def byte_level(add_prefix_space: bool = False, use_regex: bool = True) -> Tokenizer:
    tokenizer = Tokenizer.from_str(BUILTIN_FILE.read_text())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def llama_3() -> Tokenizer:
    tokenizer = byte_level()
    words = pre_tokenizers.Split(Regex(r"(?<!a)b| ?\w+|\s+(?!\S)|\s+|."), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    tokenizer.normalizer = normalizers.NFC()
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def letters(**more: Any) -> Tokenizer:
    vocab = {letter: place for place, letter in enumerate(["<unk>", *LETTERS, "▁a", "ab", "▁▁"])}
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, **more))


def metaspace(scheme: Any, split: bool = True) -> Tokenizer:
    tokenizer = letters()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return tokenizer


def llama_2() -> Tokenizer:
    tokenizer = letters(byte_fallback=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def bert() -> Tokenizer:
    vocab = {
        word: place
        for place, word in enumerate(
            ["[UNK]", "[CLS]", "[SEP]", *LETTERS, "hello", "##a", "##b", "said", "im"]
        )
    }
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(
        models.Unigram(
            [("<unk>", 0.0)] + [(word, -2.0 - len(word)) for word in [*LETTERS, "▁a", "ab"]], 0, False
        )
    )
    steps = [
        normalizers.Strip(),
        normalizers.Nmt(),
        normalizers.NFKC(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(" {2,}"), " "),
    ]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def roberta() -> Tokenizer:
    tokenizer = byte_level(add_prefix_space=True)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=True)
    return tokenizer


def with_added(tokenizer: Tokenizer, added: Sequence[AddedToken] = ADDED) -> Tokenizer:
    tokenizer.add_tokens(list(added))
    return tokenizer


CUT: dict[str, Tokenizer] = {
    "builtin": load_tokenizer(BUILTIN),
    "none added": letters(),
    **{
        name: with_added(tokenizer)
        for name, tokenizer in {
            "byte level": byte_level(),
            "byte level without words": byte_level(use_regex=False),
            "llama 3": llama_3(),
            "llama 2": llama_2(),
            "metaspace always": metaspace("always"),
            "metaspace never": metaspace("never"),
            "metaspace unsplit": metaspace("always", split=False),
            "bert": bert(),
            "unigram": unigram(),
            "roberta": roberta(),
        }.items()
    },
}


LARGE = {name: Tokens(tokenizer, None) for name, tokenizer in CUT.items()}
# The cache holds only a few segments, so that they are evicted.
SMALL = {name: Tokens(tokenizer, None) for name, tokenizer in CUT.items()}
for small in SMALL.values():
    assert small.segments is not None
    small.segments.bytes_max = 500 * SEGMENT_SHARE


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_a_text_in_segments_has_the_same_tokens_as_the_whole(name: str, texts: list[str]) -> None:
    async def read() -> None:
        for tokens in (LARGE[name], SMALL[name]):
            assert tokens.segments is not None
            for text in [*texts, "".join(texts), *texts]:  # later texts find segments of earlier ones
                whole = CUT[name].encode(text, add_special_tokens=False).ids
                assert await tokens.encode_soon(text, THREADS, special=False) == whole
                assert tokens.encode(text, special=False) == whole

    asyncio.run(read())


@given(TEXTS)
async def test_plain_prompts_get_the_tokens_that_are_added_around_them(text: str) -> None:
    for name, tokens in LARGE.items():
        whole = CUT[name].encode(text, add_special_tokens=True).ids
        for _ in range(2):
            assert await tokens.encode_soon(text, THREADS, special=True) == whole


def test_plain_prompts_are_cached_only_if_nothing_is_added_around_them() -> None:
    around = {
        name for name, tokens in LARGE.items() if tokens.segments is not None and not tokens.segments.bare
    }
    assert around == {"llama 3", "bert", "roberta"}
    for name, tokens in LARGE.items():
        plain, bare = tokens.encode("ab", special=True), tokens.encode("ab", special=False)
        assert (plain != bare) == (name in around)


def flagged(**flags: bool) -> Tokenizer:
    return with_added(byte_level(), [AddedToken("<|user|>", special=True, normalized=False, **flags)])


def truncated() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    return tokenizer


def padded() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_padding(length=30)
    return tokenizer


def first_within_others() -> Tokenizer:
    tokenizer = metaspace("never")
    inner = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), inner])
    return tokenizer


def said_twice() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $A")
    return tokenizer


WHOLE: dict[str, Tokenizer] = {
    "takes spaces before": flagged(lstrip=True),
    "takes spaces behind": flagged(rstrip=True),
    "only between words": flagged(single_word=True),
    "truncated": truncated(),
    "padded": padded(),
    "by chance": with_added(letters(dropout=0.5)),
    "first segment otherwise": with_added(metaspace("first")),
    "first segment otherwise, within": with_added(first_within_others()),
    "said twice": said_twice(),
    "endless name": with_added(byte_level(), [AddedToken("x" * 101, special=True, normalized=False)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
@given(text=TEXTS | TEXTS.map(lambda text: f"{text} <|user|> {text}"))
@settings(max_examples=20, deadline=None)
def test_tokenizers_with_dependent_segments_tokenize_whole_texts(name: str, text: str) -> None:
    tokens = Tokens(WHOLE[name], None)
    assert tokens.segments is None
    if name != "by chance":
        whole = WHOLE[name].encode(text, add_special_tokens=False).ids
        assert asyncio.run(tokens.encode_soon(text, THREADS, special=False)) == whole


def test_an_unknown_kind_of_tokenizer_is_not_cut() -> None:
    tokenizer = byte_level()
    for place in ("pre_tokenizer", "post_processor"):
        config = json.loads(tokenizer.to_str())
        config[place]["type"] = "OfTomorrow"
        assert SegmentCache.of(tokenizer, config) is None
    assert SegmentCache.of(tokenizer, json.loads(tokenizer.to_str())) is not None


def test_thousands_of_added_tokens_and_long_runs_are_matched() -> None:
    added = (
        [f"<unused{n}>" for n in range(6000)] + [" " * n for n in range(2, 101)] + ["<unused1", ".*", "[x]"]
    )
    tokenizer = with_added(byte_level(), [AddedToken(one, special=False, normalized=False) for one in added])
    tokens = Tokens(tokenizer, None)
    text = "a" + " " * 250 + "<unused17><unused1><unused1.*b[x]" + "<unused5999>" * 3 + " x <unused6000>"
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert asyncio.run(tokens.encode_soon(text, THREADS, special=False)) == whole


class Reader:
    """A tokenizer with one token per character, which records the texts it receives."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.read: list[str] = []
        self.segments = SegmentCache({"<s>": 7}, self)  # type: ignore[arg-type]
        self.segments.bytes_max = kept_bytes

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        """Implements the tokenizer's method."""
        assert not add_special_tokens
        self.read += texts
        return [SimpleNamespace(ids=[ord(char) for char in text]) for text in texts]

    async def __call__(self, *texts: str) -> list[str]:
        """Return the texts that were not cached."""
        self.read.clear()
        for text in texts:
            assert await self.segments.read(text, THREADS) == [
                token for part in text.replace("<s>", "\7") for token in (ord(part),)
            ]
        return self.read


async def test_only_the_new_part_of_the_next_turn_is_tokenized() -> None:
    reader = Reader()
    assert await reader("<s>be kind<s>hello") == ["be kind", "hello"]
    assert await reader("<s>be kind<s>hello<s>hello") == []
    assert await reader("<s>be kind<s>hello<s>hi<s>you<s>hi") == ["hi", "you"]


async def test_the_least_recently_used_segment_is_evicted_first() -> None:
    reader = Reader(SEGMENT_SHARE * 400)
    names = [f"{n:02}" + "x" * 8 for n in range(69)]  # 370 bytes each: the cache is exactly full
    assert await reader(*names) == names
    assert await reader(names[0]) == []
    assert await reader(*"abcdefghij") == [*"abcdefghij"]  # 325 bytes each: nine others are evicted
    assert await reader(names[0], *names[10:]) == []
    assert await reader(names[1]) == [names[1]]


async def test_a_segment_that_would_evict_all_others_is_not_cached() -> None:
    reader = Reader(SEGMENT_SHARE * 1000)
    some, much = "x" * 130, "你" * 60
    assert await reader(some, some, much, much) == [some, much, much]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{} ", "{} 你好 ", "{} 😀"])
async def test_the_cache_uses_no_more_memory_than_allowed(text: str) -> None:
    room = 400_000
    segments = SegmentCache({"<s>": 1}, load_tokenizer(BUILTIN))
    segments.bytes_max = room
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(3000):
            await segments.read(f"<s>{text.format(n) * (n % 40)}<s>", THREADS)
        assert len(segments.kept) > 20
        assert room * 0.1 < tracemalloc.get_traced_memory()[0] - before < room * 1.1
    finally:
        tracemalloc.stop()


async def test_only_new_long_texts_are_tokenized_outside_the_loop() -> None:
    where: list[bool] = []

    class Encoder:
        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
            where.append(threading.current_thread() is threading.main_thread())
            return [SimpleNamespace(ids=[1]) for _ in texts]

    segments = SegmentCache({"<s>": 7}, Encoder())  # type: ignore[arg-type]
    part = LONG_TEXT * 3 // 5
    await segments.read("<s>".join(["a" * part, "b" * part]), THREADS)
    await segments.read("<s>".join(["a" * part, "b" * part, "c" * part]), THREADS)
    assert where == [False, True]


async def test_two_requests_that_tokenize_the_same_text_at_once_both_get_it() -> None:
    reader = Reader()
    texts = ["<s>" + "x" * LONG_TEXT] * 3
    read = await asyncio.gather(*(reader.segments.read(text, THREADS) for text in texts))
    assert read == [[7, *[ord("x")] * LONG_TEXT]] * 3
    assert await reader(texts[0]) == []


@pytest.mark.parametrize("chat", [True, False])
async def test_a_salted_request_shares_no_cached_text(chat: bool) -> None:
    tokens, intake = (
        Tokens(byte_level(), ChatTemplate("{{ messages[0].content }}", {})),
        Intake(FrontendSettings()),
    )
    assert tokens.segments is not None

    def ask(**more: str) -> Any:
        if chat:
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **more}
            return read_chat(json.dumps(body).encode())
        return parse_completion({"model": "m", "prompt": "hello", **more})

    ((salted, _),) = await read_prompts(ask(cache_salt="mine"), tokens, 100, intake)
    assert not tokens.segments.kept
    ((plain, _),) = await read_prompts(ask(), tokens, 100, intake)
    assert (plain, list(tokens.segments.kept)) == (salted, ["hello"])


async def test_a_very_long_text_is_not_cut() -> None:
    tokens = Tokens(byte_level(), None)
    assert tokens.segments is not None
    text = "hello <s>" * (TEXT_MAX // 9 + 1)
    assert await tokens.encode_soon(text, THREADS, special=False) == tokens.encode(text, special=False)
    assert not tokens.segments.kept


async def test_a_text_with_too_many_segments_is_cut_a_limited_number_of_times() -> None:
    tokens = Tokens(byte_level(), None)
    assert tokens.segments is not None
    text = "".join(f"{n}<s>" for n in range(CUTS_MAX + 500))
    assert await tokens.encode_soon(text, THREADS, special=False) == tokens.encode(text, special=False)
    assert len(tokens.segments.kept) == CUTS_MAX + 1


async def test_returned_tokens_are_not_shared() -> None:
    tokens = Tokens(byte_level(), None)
    first = await tokens.encode_soon("hello", THREADS, special=False)
    kept = list(first)
    first.append(1)
    assert await tokens.encode_soon("hello", THREADS, special=False) == kept
