"""The parsed output as OpenAI streams it: deltas of content, reasoning and tool calls."""

import hashlib
import string
from collections.abc import Iterable
from typing import Literal, NamedTuple

SPACE_HELD_MAX = 256  # characters of white space that are withheld; a longer run is text
_ALPHANUMERIC = string.ascii_letters + string.digits


class OutputDelta(NamedTuple):
    """One piece of the parsed output. `text` is content, reasoning, or a fragment of a call's arguments."""

    kind: Literal["content", "reasoning", "tool_call"]
    text: str
    call: int = -1  # index of the tool call, from 0
    id: str = ""  # of the tool call; only in its first delta, as is the name
    name: str = ""


class ParsedCall(NamedTuple):
    """A tool call. `arguments` is JSON text, cut off or malformed if the call is incomplete."""

    name: str
    arguments: str
    id: str = ""


class ParsedOutput(NamedTuple):
    """A whole answer, parsed into content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()


def collect(deltas: Iterable[OutputDelta]) -> ParsedOutput:
    """Join the deltas of an answer into a whole answer."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[tuple[OutputDelta, list[str]]] = []
    for delta in deltas:
        if delta.kind != "tool_call":
            texts[delta.kind].append(delta.text)
            continue
        if delta.name:
            calls.append((delta, []))
        calls[delta.call][1].append(delta.text)
    return ParsedOutput(
        "".join(texts["content"]),
        "".join(texts["reasoning"]),
        tuple(ParsedCall(first.name, "".join(fragments), first.id) for first, fragments in calls),
    )


def call_id(seed: str, index: int, *, alphanumeric: bool) -> str:
    """Return an id for the call with this index: nine letters and digits if `alphanumeric`, else in vLLM's form.

    The id depends only on these three parameters. So it stays the same if another worker continues the answer.
    """
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    if alphanumeric:
        return "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in digest[:9])
    return f"chatcmpl-tool-{digest.hex()[:32]}"


class SpaceHolder:
    """Withholds white space at the end of a text until more text follows it."""

    def __init__(self) -> None:
        """Start without held white space."""
        self._held = ""
        self._run = 0  # length of the current run of white space, held or not

    def passed(self, text: str) -> str:
        """Add text. Return the text that may be sent now: all except the white space at the end.

        White space is also sent once it is longer than SPACE_HELD_MAX characters.
        """
        visible = text.rstrip()
        space = text[len(visible) :]
        if visible:
            visible, self._held, self._run = self._held + visible, "", 0
        self._run += len(space)
        self._held += space
        if self._run > SPACE_HELD_MAX:
            visible, self._held = visible + self._held, ""
        return visible

    def release(self) -> str:
        """Return the held white space, and stop holding it."""
        held, self._held, self._run = self._held, "", 0
        return held


class DeltaSink:
    """Collects the deltas of one answer.

    White space at the beginning of the answer is withheld until content or a call follows. Before a call it is dropped.
    """

    def __init__(self, id_seed: str, *, alphanumeric_ids: bool = False) -> None:
        """Start without deltas. `id_seed` determines the ids of calls to which the model gives no id."""
        self._deltas: list[tuple[OutputDelta, list[str]]] = []  # each with the parts of its text
        self._id_seed = id_seed
        self._alphanumeric_ids = alphanumeric_ids
        self._content_space = SpaceHolder()
        self._reasoning_space = SpaceHolder()
        self._trim_content = False  # whether line breaks before the content are dropped
        self.has_content = (
            False  # whether visible content was collected since the start, or since the last call
        )
        self.calls = 0  # calls begun
        self.incomplete: list[int] = []  # indexes of the calls without valid arguments so far

    def take(self) -> list[OutputDelta]:
        """Return the deltas collected since the last call of this method.

        Adjacent deltas of the same kind are joined, but not those of different tool calls.
        """
        taken, self._deltas = self._deltas, []
        return [delta._replace(text="".join(parts)) for delta, parts in taken]

    def _add(self, delta: OutputDelta) -> None:
        last = self._deltas[-1][0] if self._deltas else None
        if last and last.kind == delta.kind and last.call == delta.call:
            self._deltas[-1][1].append(delta.text)
        else:
            self._deltas.append((delta, [delta.text]))

    def content(self, text: str) -> None:
        """Collect content. White space right after a call is dropped."""
        if not self.has_content:
            if self.calls:
                text = text.lstrip()
            else:
                text = self._content_space.passed(text) + (
                    self._content_space.release() if text.strip() else ""
                )
                text = text.lstrip("\n") if self._trim_content else text
            self.has_content = bool(text)
        if text:
            self._add(OutputDelta("content", text))

    def reasoning(self, text: str, *, trim: bool = False) -> None:
        """Collect reasoning. If `trim` is true, white space at its end is withheld."""
        if trim:
            text = self._reasoning_space.passed(text)
        if text:
            self._add(OutputDelta("reasoning", text))

    def end_reasoning(self, *, trim_content: bool) -> None:
        """End a section of reasoning, and drop the white space that was withheld at its end.

        If `trim_content` is true, line breaks before the content are dropped.
        """
        self._reasoning_space.release()
        self._trim_content = trim_content

    def begin_call(self, name: str, own_id: str = "") -> None:
        """Begin a tool call. `own_id` is the id that the model gave to the call; empty if it gave none."""
        self._content_space.release()
        self.has_content = False
        if not own_id:
            own_id = call_id(self._id_seed, self.calls, alphanumeric=self._alphanumeric_ids)
        self._add(OutputDelta("tool_call", "", self.calls, own_id, name))
        self.incomplete.append(self.calls)
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Collect a fragment of the current call's arguments."""
        if text:
            self._add(OutputDelta("tool_call", text, self.calls - 1))

    def end_call(self, *, complete: bool) -> None:
        """End the current call. `complete` is false if the call's text was cut off or is malformed."""
        if complete:
            self.incomplete.pop()

    def finish(self) -> None:
        """End the answer. White space that is still withheld becomes content, or is dropped.

        It is dropped if the answer has calls, or if `trim_content` was true in the last call of `end_reasoning`.
        """
        space = self._content_space.release()
        if space and not self.calls and not self._trim_content:
            self._add(OutputDelta("content", space))
