"""Detokenization and stop strings: correct for any split, without sending a part of a stop string."""

import itertools
import json
import time
from typing import Any, SupportsIndex

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.frontend.openai.request_parser import parse_completion
from controller.frontend.openai.text.detokenizer import IncrementalDetokenizer
from controller.frontend.openai.text.tokenizer import BUILTIN, load_tokens
from controller.frontend.openai.writers import BufferedWriter, ResponseFormat, StreamingWriter
from events.wire import Logprob

LETTERS = st.text(alphabet="ab", max_size=30)


class StopChecker(IncrementalDetokenizer):
    """Searches texts for stop strings."""

    def __init__(self, stops: list[str], min_tokens: int = 0) -> None:
        super().__init__(load_tokens(BUILTIN).detokenizer(), stops, min_tokens)

    def feed_piece(self, text: str) -> str:
        """Add a text that counts as one token. Return the text that may be sent now."""
        return self.feed_text(text, 1)


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@given(
    LETTERS,
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 99)),
)
def test_any_split_gives_the_text_before_the_first_stop_string(
    text: str, stops: list[str], places: list[int]
) -> None:
    window, said = StopChecker(stops), ""
    for piece in cut(text, places):
        said += window.feed_piece(piece)
        if window.stopped:
            break
    if not window.stopped:
        said += window.end()
    assert window.stopped == any(stop in text for stop in stops)
    if not window.stopped:
        assert said == text
    else:
        assert text.startswith(said)
        assert not any(stop in said for stop in stops)


@given(LETTERS, st.text(alphabet="ab", min_size=1, max_size=4))
def test_text_that_cannot_become_a_stop_string_is_not_held_back(text: str, stop: str) -> None:
    window = StopChecker([stop])
    said = window.feed_piece(text)
    held = len(text) - len(said) if not window.stopped else 0
    assert held < len(stop)


@given(
    LETTERS,
    st.lists(st.text(alphabet="ab", min_size=1, max_size=9), min_size=1, max_size=3),
    st.integers(0, 40),
)
def test_the_held_text_is_the_longest_beginning_of_a_stop_string(
    text: str, stops: list[str], at: int
) -> None:
    window = StopChecker(stops)
    said = window.feed_piece(text[:at]) + ("" if window.stopped else window.feed_piece(text[at:]))
    if not window.stopped:
        beginnings = [
            stop[:size] for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])
        ]
        assert said + max(beginnings, key=len) == text
        assert (window.end(), StopChecker(stops, 2).feed_piece(text)) == (max(beginnings, key=len), text)


class Seen(str):
    """A stop string that counts how often its characters are read."""

    looks = 0

    def __getitem__(self, at: SupportsIndex | slice) -> str:
        Seen.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize(
    "text", ["a" * 5000, ("a" * 300 + "c") * 20, ("a" * 150 + "d" + "a" * 149 + "e") * 20]
)
def test_nearly_matching_stop_strings_cost_no_more_than_others(text: str) -> None:
    stops: list[str] = [
        Seen("a" * 299 + "b"),
        Seen("c" * 300),
        Seen("a" * 150 + "d" + "a" * 150),
        Seen("ab" * 150),
    ]
    window = StopChecker(stops)
    Seen.looks = 0
    for piece in cut(text, list(range(0, len(text), 4))):
        window.feed_piece(piece)
    assert 0 < Seen.looks <= 3 * len(stops) * len(text)


def test_held_text_is_sent_at_the_end() -> None:
    tokens = load_tokens(BUILTIN)
    detokenizer = IncrementalDetokenizer(tokens.detokenizer(), ["river bed"], 0)
    said = "".join(detokenizer.feed(token) for token in tokens.encode("a river b", special=False))
    assert said == "a "
    assert said + detokenizer.end() == "a river b"


def test_incomplete_characters_are_flushed_at_the_end() -> None:
    tokens = load_tokens(BUILTIN)
    ids = tokens.encode("é", special=False)[:1]
    detokenizer = IncrementalDetokenizer(tokens.detokenizer(), [], 0)
    assert "".join(map(detokenizer.feed, ids)) + detokenizer.end() == tokens.decode(ids) == "\ufffd"


def format_of(id: str = "id", **asked: Any) -> ResponseFormat:
    """Return the response format of a completion, changed by `asked`."""
    parsed = msgspec.structs.replace(parse_completion({"model": "m", "prompt": "p"}), **asked)
    return ResponseFormat(parsed, load_tokens(BUILTIN), id, 5)


def logprobs_of(count: int) -> dict[str, list[int]]:
    """Return the logprobs of a whole answer of this many tokens, as shown by the completions endpoint."""
    format = format_of(logprobs=1)
    writer = BufferedWriter(format)
    writer.write([300] * count, [Logprob(chosen=-1.0)] * count)
    writer.finish("length")
    shown: dict[str, list[int]] = writer.choice(0)["logprobs"]
    return shown


def test_logprobs_contain_the_text_offset_of_each_token() -> None:
    size = len(load_tokens(BUILTIN).text_of(300))
    assert logprobs_of(3)["text_offset"] == [0, size, 2 * size]
    assert logprobs_of(0)["text_offset"] == []


def test_logprobs_of_a_long_answer_do_not_block_the_loop() -> None:
    began = time.process_time()
    logprobs_of(50_000)
    assert time.process_time() - began < 2.0


class Page:
    """Records what a stream would send."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def flush(self) -> None:
        pass

    @property
    def texts(self) -> list[str]:
        """The text of each event."""
        events = [event.removeprefix(b"data: ") for event in b"".join(self.parts).split(b"\n\n")[:-1]]
        return [json.loads(event)["choices"][0]["text"] for event in events]


@given(
    st.lists(st.one_of(st.integers(0, 2047), st.integers(3, 258)), max_size=40),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_tokens_that_arrive_together_are_the_same_events_as_separate_ones(
    said: list[int], portions: list[int]
) -> None:
    tokens = load_tokens(BUILTIN)
    format = format_of()
    pages = []
    for sizes in (portions, [1]):
        page = Page()
        writer, at, turn = StreamingWriter(format, page, 0), 0, 0  # type: ignore[arg-type]
        while at < len(said):
            portion = said[at : at + sizes[turn % len(sizes)]]
            assert writer.write(portion, None) == len(portion)
            at, turn = at + len(portion), turn + 1
        writer.finish("length")
        pages.append(page)
    assert b"".join(pages[0].parts) == b"".join(pages[1].parts)
    assert "".join(pages[0].texts) == tokens.decode(said)
    assert sum(259 <= token < 2048 for token in said) <= len(pages[0].texts), "each token is its own event"


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_cached_parts_of_events_equal_uncached_ones(chat: bool, usage: bool) -> None:
    """Every event byte by byte, for two requests and two alternating choices; ids and names may contain anything."""
    tokens = load_tokens(BUILTIN)
    for id, model, index, reason in 2 * [('a"b', "m\u20ac", 0, "stop"), ("c", "m", 7, 'odd"one')]:
        format = format_of(
            id, model=model, api="chat" if chat else "completions", stream=usage, include_usage=usage
        )
        page = Page()
        writer = StreamingWriter(format, page, index)  # type: ignore[arg-type]
        writer.write([300, 301], None)
        writer.finish(reason)
        page.parts.append(format.total({"total_tokens": 3}))

        def whole(choices: list[dict[str, object]], last: object = None) -> bytes:
            name = "chat.completion.chunk" if chat else "text_completion"
            kind = "chatcmpl" if chat else "cmpl"
            body: dict[str, object] = {"id": f"{kind}-{id}", "object": name, "created": 5, "model": model}  # noqa: B023
            body["choices"] = [{"index": index} | choice for choice in choices]  # noqa: B023
            if usage or last:
                body["usage"] = last
            return b"data: " + msgspec.json.encode(body) + b"\n\n"

        goes_on: dict[str, object] = {"logprobs": None, "finish_reason": None}
        said = [{"content": tokens.text_of(token)} for token in (300, 301)]
        ending = {"logprobs": None, "finish_reason": reason, "stop_reason": None}
        opening = [whole([{"delta": {"role": "assistant", "content": ""}, **goes_on}])] if chat else []
        assert b"".join(page.parts) == b"".join(
            [
                *opening,
                *(
                    whole([{**({"delta": one} if chat else {"text": one["content"]}), **goes_on}])
                    for one in said[:-1]
                ),
                whole([{**({"delta": said[-1]} if chat else {"text": said[-1]["content"]}), **ending}]),
                whole([], {"total_tokens": 3}),
            ]
        )
