"""By which fields does this server let itself be told what form an answer must have? Asked when a request first wants it.

vLLM has had two names for one thing: `guided_choice` and its like first, `structured_outputs` later. A server that does not
know a name pays it no heed and answers as it likes, so that it says nothing that such a request was not refused: each name is
tried with a choice of one word, and only what is obeyed is used.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from events.refusal import unsupported
from workers.engines.openai.reading import Fault

WORD = "zebra"  # nobody says it by chance behind three token ids
Style = Literal["structured_outputs", "guided", "response_format"]
GUIDED = "guided_"
KINDS = ("json", "regex", "choice", "grammar")  # that both of vLLM's names have
SCHEMA = {"name": "probe", "schema": {"type": "string", "enum": [WORD]}}
PROBES: dict[Style, dict[str, Any]] = {
    "structured_outputs": {"structured_outputs": {"choice": [WORD]}},
    "guided": {"guided_choice": [WORD]},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
}


class Constraints:
    """What one server obeys, as far as it has been asked."""

    def __init__(self, complete: Callable[[dict[str, Any]], Awaitable[str | None]]) -> None:
        """`complete` returns the text of a short completion with these fields; None if they are refused."""
        self._complete = complete
        self._obeyed: dict[Style, bool] = {}
        self._asking = asyncio.Lock()

    async def phrased(self, guided: dict[str, Any]) -> dict[str, Any]:
        """Return a client's constraint in the words that the server obeys. Raise Fault where there are none."""
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
        async with self._asking:
            if style not in self._obeyed:
                text = await self._complete(PROBES[style])
                self._obeyed[style] = text is not None and text.strip().strip('"') == WORD
            return self._obeyed[style]


def _kinds(field: str, value: Any) -> dict[str, Any]:
    """Return what a field says, as `structured_outputs` has it."""
    if field.startswith(GUIDED):
        return {field.removeprefix(GUIDED): value}
    if field != "response_format":
        return {kind: what for kind, what in value.items() if what is not None}
    if value["type"] == "json_object":
        return {"json_object": True}
    described = value.get("json_schema")
    return {"json": described.get("schema", {}) if isinstance(described, dict) else {}}
