"""Parses whole texts in tests: in one piece, in given pieces, or resumed."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from controller.frontend.openai.tools.output_delta import OutputDelta, ParsedOutput, collect
from controller.frontend.openai.tools.output_parser import OutputParser
from controller.frontend.openai.tools.reasoning_formats import REASONING_FORMATS
from controller.frontend.openai.tools.tool_formats import DSML, REQUIRED, TOOL_FORMATS, ToolFormat

FORMATS = TOOL_FORMATS | {REQUIRED.name: REQUIRED}
HARMONY_MARKERS = frozenset(
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")
)


def markers_in(one: ToolFormat) -> frozenset[str]:
    """Return the markers of a format that are longer than a character."""
    known = {*one.section_start, one.section_end, *one.call_start, one.call_end, *one.header_ends}
    known |= {DSML} if DSML in one.section_end else set()
    return frozenset({mark for mark in known if len(mark) > 1} | (HARMONY_MARKERS if one.channels else set()))


class Setup(NamedTuple):
    """The formats of an answer, by their names, and what the parser knows about its request."""

    tools: str = ""
    reasoning: str = ""
    in_reasoning: bool = False
    schemas: Mapping[str, Any] = {}
    named: str = ""

    def parser(self) -> OutputParser:
        """Return a new parser."""
        return OutputParser(
            FORMATS[self.tools] if self.tools else None,
            REASONING_FORMATS[self.reasoning] if self.reasoning else None,
            tools=self.schemas,
            in_reasoning=self.in_reasoning,
            named=self.named,
            id_seed="answer",
        )


class Parsed(NamedTuple):
    """A parsed answer: the joined deltas, the finish reason, and the indexes of unfinished calls."""

    output: ParsedOutput
    reason: str
    incomplete: tuple[int, ...]

    def calls(self) -> list[tuple[str, str]]:
        """Return the names and arguments of the calls."""
        return [(call.name, call.arguments) for call in self.output.calls]


def parse_pieces(setup: Setup, pieces: Iterable[str], reason: str = "stop") -> Parsed:
    """Feed pieces, and finish."""
    parser = setup.parser()
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return finished(parser, deltas, reason)


def finished(parser: OutputParser, deltas: list[OutputDelta], reason: str) -> Parsed:
    """Finish a parser that has returned these deltas."""
    last, finish_reason = parser.finish(reason)
    return Parsed(collect([*deltas, *last]), finish_reason, parser.incomplete_calls)


def parse(text: str, tools: str = "", reason: str = "stop", **setup: Any) -> Parsed:
    """Parse a whole text in one piece, and check that single characters yield the same."""
    whole = parse_pieces(Setup(tools, **setup), [text], reason)
    assert parse_pieces(Setup(tools, **setup), text, reason) == whole
    return whole
