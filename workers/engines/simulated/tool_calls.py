"""The tool calls of the simulated model.

The chat template of `builtin:sim` writes the tools of a request into the first line of the prompt, unless `tool_choice` is
`none`. If no tool's result follows the last user message, the answer is a call of one of these tools. The call has the format of
Hermes, and arguments that fit the tool's schema. After a tool's result, the answer is text, so that an agent's conversation ends.
The call depends on the prompt alone, like all answers.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from events.grammar.constraint import NO_PARAMETERS, constraint_of
from events.grammar.refusals import GrammarRefused
from events.json_types import Json
from workers.engines.simulated.language import TOOLS, token_bytes

FIRST_TOKENS = 8  # tokens that are long enough for this beginning
KEPT = 64


def call_constraint(prompt: Sequence[int]) -> Json | None:
    """Return the constraint that makes an answer call a tool, or None if the answer is to be text."""
    known = token_bytes()
    if not b"".join(known.get(token, b"") for token in prompt[:FIRST_TOKENS]).startswith(TOOLS):
        return None
    text = b"".join(known.get(token, b"") for token in prompt)
    if text.rfind(b"\nuser: ") < text.rfind(b"\ntool: "):
        return None
    return _constraint(text[len(TOOLS) :].partition(b"\n")[0])


@lru_cache(KEPT)
def _constraint(tools: bytes) -> Json | None:
    """Return the constraint that allows only calls of the tools in `tools`, a JSON list.

    Return None if the list is invalid, or if the tools' schemas cannot be expressed as a grammar.
    """
    try:
        calls = [_call(tool["function"]) for tool in json.loads(tools)]
        form = {"type": "structural_tag", "format": {"type": "or", "elements": calls}}
        return {
            "structured_outputs": {
                "grammar": constraint_of({"structured_outputs": {"structural_tag": form}}).ebnf
            }
        }
    except (ValueError, TypeError, KeyError, GrammarRefused):
        return None


def _call(function: Any) -> Json:
    """Return the part of a structural tag that describes a call of one tool. `function` is its definition."""
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": function.get("parameters") or NO_PARAMETERS},
        "end": "}\n</tool_call>",
    }
