"""Chat templates of 34 model families render like transformers' `apply_chat_template`.

`chat_templates/` contains our own templates, written with the constructs of these families. `conversations.json` contains the
messages to render with each, `expected.json` the results. `make test` compares the product with these, `make test-engines`
compares transformers with them. After a change of a template, run `python tests/frontend/openai/text/test_chat_templates.py`
and review the difference.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from controller.frontend.openai.request_parser import parse_any_chat
from controller.frontend.openai.text.chat_templates import BadTemplate, ChatTemplate

FOLDER = Path(__file__).with_name("chat_templates")
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
CONVERSATIONS: Mapping[str, Any] = json.loads((FOLDER / "conversations.json").read_text())
SPECIALS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
PARTS = {
    "llama4_parts",
    "smolvlm_parts_only",
    "mistral_tekken_blocks",
    "gemma3",
    "kimi_k2",
}  # families with a loop over a message's parts
REFUSED = None  # refused by the template itself


def source(family: str) -> str:
    return (FOLDER / f"{family}.jinja").read_text()


def ours(family: str) -> dict[str, str | None]:
    """Return the product's rendering of each conversation, starting from a request body."""
    template, made = ChatTemplate(source(family), SPECIALS), dict[str, str | None]()
    for name, conversation in CONVERSATIONS.items():
        body = {"model": "m", "messages": conversation["messages"]}
        if "tools" in conversation:
            body |= {"tools": conversation["tools"], "tool_choice": "none"}
        if "add_generation_prompt" in conversation:
            body["chat_template_kwargs"] = {"add_generation_prompt": conversation["add_generation_prompt"]}
        parsed = parse_any_chat(body)
        assert parsed.messages is not None
        try:
            made[name] = template.render(parsed.messages, **(parsed.template_extra or {}))
        except BadTemplate:
            made[name] = REFUSED
    return made


def expected() -> Mapping[str, Mapping[str, str | None]]:
    read: Mapping[str, Mapping[str, str | None]] = json.loads((FOLDER / "expected.json").read_text())
    return read


def test_there_are_templates_of_at_least_30_families() -> None:
    assert len(FAMILIES) >= 30 and sorted(expected()) == FAMILIES
    rendered = [text for family in expected().values() for text in family.values()]
    assert sum(text is not REFUSED for text in rendered) > 0.85 * len(rendered)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_renders_as_expected(family: str) -> None:
    assert ours(family) == expected()[family]


@pytest.mark.engines
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_renders_the_same(family: str) -> None:
    assert theirs(family) == expected()[family]


def theirs(family: str) -> dict[str, str | None]:
    """Return transformers' rendering of each conversation. It accepts messages as templates do, not as the API does."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    made: dict[str, str | None] = {}
    for name, conversation in CONVERSATIONS.items():
        messages = [for_templates(message, family) for message in conversation["messages"]]
        try:
            rendered: Any = render_jinja_template(  # annotated as returning a string
                conversations=[messages],
                tools=[whole_tool(tool) for tool in conversation.get("tools", ())] or None,
                chat_template=source(family),
                add_generation_prompt=conversation.get("add_generation_prompt", True),
                **SPECIALS,
            )
            (made[name],), _ = rendered
        except (TemplateError, TypeError):
            made[name] = REFUSED
    return made


def whole_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as vLLM's chat endpoint passes it to a template: with a description and parameters, even if null."""
    fields = {name: tool["function"].get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": fields}


def for_templates(message: dict[str, Any], family: str) -> dict[str, Any]:
    """Return an API message as vLLM's chat endpoint passes it to a template."""
    plain: dict[str, Any] = {**message, "content": message["content"] or ""}
    if isinstance(plain["content"], list) and family not in PARTS:
        plain["content"] = "\n".join(part["text"] for part in plain["content"])
    if isinstance(plain["content"], str) and family == "smolvlm_parts_only":
        plain["content"] = [{"type": "text", "text": plain["content"]}]
    if (
        plain["role"] == "developer"
        and '"developer"' not in source(family)
        and "'developer'" not in source(family)
    ):
        plain["role"] = "system"
    for call in (plain := json.loads(json.dumps(plain))).get("tool_calls", []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return plain


if __name__ == "__main__":
    written = {family: ours(family) for family in FAMILIES}
    (FOLDER / "expected.json").write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
