"""Outputs made to be expensive: parsing takes linear time, withholds little, and never raises."""

import time
from collections.abc import Iterator

import pytest
from output_parsing import Setup, parse_pieces

from controller.frontend.openai.tools.call_reader import HELD_MAX
from controller.frontend.openai.tools.reasoning_formats import REASONING_FORMATS

SCHEMAS = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}
HOSTILE = [  # format, a beginning, and what is repeated
    ("hermes", "", "<"),
    ("hermes", "", "<tool_call"),
    ("hermes", "", "<tool_call>"),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>", " "),
    ("hermes", '<tool_call>{"name": "', "f"),
    ("hermes", '<tool_call>{"name": "f", "x": ', "["),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "["),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "1"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "1, "),
    ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
    ("hermes", "<tool_call>{", '"a": 1, '),
    ("granite", '<tool_call>[{"name": "f", "arguments": {}}', ", "),
    ("mistral", "", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]", "f"),
    ("llama3_json", "", "{"),
    ("llama3_json", "", '{"name": "f", "parameters": {}};'),
    ("pythonic", "", "["),
    ("pythonic", "[f(s='", "\\'"),
    ("pythonic", "[f(s=", "("),
    ("pythonic", "[", "f(), "),
    ("pythonic", "[f(a=1", ", a=1"),
    ("qwen3_coder", "", "<function="),
    ("qwen3_coder", "<function=f>", "<parameter=a>"),
    ("qwen3_coder", "<function=f><parameter=a>", "9"),
    ("qwen3_coder", "<function=f><parameter=s>", "\n<"),
    ("deepseek_v4", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="', '" string="'),
    ("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ("openai", "", "<|channel|>"),
    ("openai", "", "<|start|><|end|>"),
]


def pieces_of(text: str, size: int) -> Iterator[str]:
    """Cut a text into pieces, as tokens would."""
    return (text[start : start + size] for start in range(0, len(text), size))


def seconds(setup: Setup, text: str) -> float:
    """Return the CPU time of parsing a text in small pieces, and then resuming after all of it at once."""
    started = time.process_time()
    parse_pieces(setup, pieces_of(text, 5))
    setup.parser().resume(text)
    return time.process_time() - started


@pytest.mark.slow
@pytest.mark.parametrize(("tools", "start", "repeated"), HOSTILE)
def test_parsing_takes_linear_time(tools: str, start: str, repeated: str) -> None:
    """Eight times the text takes about eight times as long; 64 times would be quadratic."""
    setup = Setup(tools, schemas=SCHEMAS)
    short, long = (start + repeated * (size // len(repeated)) for size in (4_000, 32_000))
    base = max(min(seconds(setup, short) for _ in range(2)), 0.001)
    assert min(seconds(setup, long) for _ in range(2)) < 24 * base


@pytest.mark.slow
@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_repeated_reasoning_markers_take_linear_time(reasoning: str) -> None:
    thinking = REASONING_FORMATS[reasoning]
    setup = Setup("hermes", reasoning, in_reasoning=True)
    for marker in (*thinking.start, *thinking.end, " "):
        short, long = (marker * (size // len(marker)) for size in (4_000, 32_000))
        base = max(seconds(setup, short), 0.001)
        assert min(seconds(setup, long) for _ in range(2)) < 24 * base


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tools", "start", "repeated"),
    [
        ("hermes", '<tool_call>{"name": "f", "id": "', "x"),
        ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
        ("hermes", '<tool_call>{"arguments": "', "x"),
        ("pythonic", "[f(s='", "x"),
    ],
)
def test_text_that_may_be_a_call_is_withheld_up_to_a_limit(tools: str, start: str, repeated: str) -> None:
    parser = Setup(tools).parser()
    text = start + repeated * (HELD_MAX // len(repeated) + 100)
    sent = "".join(delta.text for piece in pieces_of(text, 10_000) for delta in parser.feed(piece))
    assert sent == text
    assert parser.calls_begun == 0


def test_numbers_and_nesting_that_python_cannot_convert_do_not_raise() -> None:
    for value in ("9" * 5000, "[" * 5000, "1e999", "\ud800"):
        text = f"<function=f><parameter=a>{value}</parameter></function>"
        assert len(parse_pieces(Setup("qwen3_coder", schemas=SCHEMAS), [text]).output.calls) == 1
        parse_pieces(Setup("pythonic"), [f"[f(a={value})]"])
        parse_pieces(
            Setup("hermes"), [f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>']
        )


def test_half_of_a_surrogate_pair_never_reaches_a_client() -> None:
    """UTF-8 has no bytes for it: writing the response would fail."""
    for tools, text in (
        ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
        ("pythonic", "[f(s='\\ud83d')]"),
    ):
        for call in parse_pieces(Setup(tools), [text]).output.calls:
            f"{call.name}{call.arguments}".encode()
