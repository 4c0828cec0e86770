"""Generates the field tables of docs/reference/api.md from the request body models:

python tests/docs/api_page.py
"""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from controller.frontend.openai.messages.models import (
    IGNORED_BY_MESSAGES,
    REFUSED_BY_MESSAGES,
    MessagesBody,
)
from controller.frontend.openai.request_models import (
    IGNORED,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    ChatBody,
    CompletionBody,
    Harmless,
)
from controller.frontend.openai.responses.models import (
    IGNORED_BY_RESPONSES,
    REFUSED_BY_RESPONSES,
    ResponsesBody,
)

MESSAGES_BEGIN = "<!-- generated: messages (python tests/docs/api_page.py) -->"
MESSAGES_END = "<!-- end of messages -->"
RESPONSES_BEGIN = "<!-- generated: responses (python tests/docs/api_page.py) -->"
RESPONSES_END = "<!-- end of responses -->"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
BEGIN = "<!-- generated: fields (python tests/docs/api_page.py) -->"
END = "<!-- end of generated -->"
CHAT, COMPLETIONS = ChatBody.model_fields, CompletionBody.model_fields


def tables() -> str:
    """Return the page's generated part."""
    return "\n".join([*_obeyed(), "", *_refused(), "", *_ignored(), ""])


def _obeyed() -> list[str]:
    lines = ["### Obeyed", "", "| field | where | says |", "|---|---|---|"]
    for name in sorted({*CHAT, *COMPLETIONS}):
        notes = [fields[name].description or "" for fields in (CHAT, COMPLETIONS) if name in fields]
        said = max(notes, key=len).replace("|", "\\|")
        lines.append(f"| `{name}` | {_where(name in CHAT, name in COMPLETIONS)} | {said} |")
    return lines


def _refused() -> list[str]:
    lines = ["### Refused", "", "| field | where | passes as |", "|---|---|---|"]
    for name in sorted({*REFUSED_BY_CHAT, *REFUSED_BY_COMPLETIONS}):
        where = _where(name in REFUSED_BY_CHAT, name in REFUSED_BY_COMPLETIONS)
        both = {
            tuple(map(json.dumps, refused[name]))
            for refused in (REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS)
            if name in refused
        }
        passing = " or ".join(", ".join(f"`{value}`" for value in values) for values in sorted(both))
        lines.append(f"| `{name}` | {where} | {passing} |")
    return lines


def _ignored() -> list[str]:
    lines = ["### Ignored, because they change no answer", "", "| field | why |", "|---|---|"]
    return lines + [f"| `{name}` | {why} |" for name, why in sorted(IGNORED.items())]


def _where(chat: bool, completions: bool) -> str:
    return "both" if chat and completions else "chat" if chat else "completions"


def own_table(body: type[BaseModel], refused: Harmless, ignored: Mapping[str, str]) -> str:
    """Return the fields of an API with one body: those that it obeys, refuses and ignores."""
    lines = ["| field | result |", "|---|---|"]
    lines += [f"| `{name}` | {field.description} |" for name, field in sorted(body.model_fields.items())]
    for name, values in sorted(refused.items()):
        lines.append(
            f"| `{name}` | refused, except {', '.join(f'`{json.dumps(value)}`' for value in values)} |"
        )
    lines += [f"| `{name}` | ignored: {why} |" for name, why in sorted(ignored.items())]
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """Return `page` with its tables generated again."""
    messages = own_table(MessagesBody, REFUSED_BY_MESSAGES, IGNORED_BY_MESSAGES)
    responses = own_table(ResponsesBody, REFUSED_BY_RESPONSES, IGNORED_BY_RESPONSES)
    for begin, end, made in (
        (BEGIN, END, tables()),
        (MESSAGES_BEGIN, MESSAGES_END, messages),
        (RESPONSES_BEGIN, RESPONSES_END, responses),
    ):
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{made}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
