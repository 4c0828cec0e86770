"""Probes which request fields a server obeys to constrain its answers, when a request first needs one.

vLLM has used two names: first `guided_choice` and similar fields, later `structured_outputs`. A server ignores a name that it
does not know, so acceptance proves nothing. The probe sends each name with a choice of one word. The name is used if the answer
is that word.

Behind a reasoning parser, vLLM constrains only what follows the reasoning, so the word does not appear. There, a name is used
if the server rejects a contradictory constraint. The contradiction is one that the server rejects before it reaches the engine:
in some versions, a grammar that does not compile ends vLLM's engine.

A failed probe is repeated after 10 s, and the wait doubles each time, up to 15 min. A successful probe is repeated after 15
min, or as soon as the upstream may have been replaced by another server: after 401, 403, 404 or a broken connection.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from events.refusal import unsupported
from workers.engines.openai.stream_decoder import Fault

WORD = "zebra"  # an unlikely answer to three token ids
Style = Literal["structured_outputs", "guided", "response_format"]
GUIDED = "guided_"
KINDS = ("json", "regex", "choice", "grammar")  # both of vLLM's names support these
SCHEMA = {"name": "probe", "schema": {"type": "string", "enum": [WORD]}}
PROBES: dict[Style, dict[str, Any]] = {
    "structured_outputs": {"structured_outputs": {"choice": [WORD]}},
    "guided": {"guided_choice": [WORD]},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
}
CONTRADICTIONS: dict[Style, dict[str, Any]] = {
    "structured_outputs": {"structured_outputs": {"choice": [WORD], "regex": WORD}},
    "guided": {"guided_choice": [WORD], "guided_regex": WORD},
    "response_format": {"response_format": {"type": WORD}},
}
REPEAT_S_MIN = 10.0
REPEAT_S_MAX = 900.0


@dataclass(slots=True)
class Failed:
    """A failed probe: the time of its repetition (loop seconds), and the wait until then."""

    again_at: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class Obeyed:
    """A successful probe: its expiry (loop seconds), and the upstream's doubt count at that time."""

    until: float
    doubts: int


class Constraints:
    """The constraint fields that one server is known to obey."""

    def __init__(
        self,
        complete: Callable[[dict[str, Any]], Awaitable[str | None]],
        doubts: Callable[[], int] = lambda: 0,
    ) -> None:
        """`complete` returns the text of a short completion with these fields; None if the server rejects them.

        `doubts` returns how often the upstream has behaved like another server.
        """
        self._complete = complete
        self._doubts = doubts
        self._obeyed: dict[Style, Obeyed] = {}
        self._failed: dict[Style, Failed] = {}
        self._probing = asyncio.Lock()

    async def translate(self, guided: dict[str, Any]) -> dict[str, Any]:
        """Translate a client's constraint into fields that the server obeys. Raise Fault if it obeys none."""
        ((field, value),) = guided.items()
        kinds = _kinds(field, value)
        if field == "response_format" and await self._obeys("response_format"):
            return guided
        if await self._obeys("structured_outputs"):
            return {"structured_outputs": kinds}
        if kinds.keys() <= set(KINDS) and await self._obeys("guided"):
            return {GUIDED + kind: what for kind, what in kinds.items()}
        raise Fault(unsupported(field, "this model's server does not constrain its answers by it").error)

    async def _obeys(self, style: Style) -> bool:
        async with self._probing:
            now, failed = asyncio.get_running_loop().time(), self._failed.get(style)
            obeyed, doubts = self._obeyed.get(style), self._doubts()
            if obeyed is not None and now < obeyed.until and doubts == obeyed.doubts:
                return True
            if failed is not None and now < failed.again_at:
                return False
            if await self._probe(style):
                self._obeyed[style] = Obeyed(now + REPEAT_S_MAX, doubts)
                self._failed.pop(style, None)
                return True
            self._obeyed.pop(style, None)
            wait_s = REPEAT_S_MIN if failed is None else min(2 * failed.wait_s, REPEAT_S_MAX)
            self._failed[style] = Failed(now + wait_s, wait_s)
            return False

    async def _probe(self, style: Style) -> bool:
        """Return whether the server obeys this name, or at least validates it. Raise Fault, UpstreamUnavailable."""
        text = await self._complete(PROBES[style])
        if text is None:
            return False
        return text.strip().strip('"') == WORD or await self._complete(CONTRADICTIONS[style]) is None


def _kinds(field: str, value: Any) -> dict[str, Any]:
    """Convert a field's constraint to the form of `structured_outputs`."""
    if field.startswith(GUIDED):
        return {field.removeprefix(GUIDED): value}
    if field != "response_format":
        return {kind: what for kind, what in value.items() if what is not None}
    if value["type"] == "json_object":
        return {"json_object": True}
    described = value.get("json_schema")
    return {"json": described.get("schema", {}) if isinstance(described, dict) else {}}
