"""docs/reference/api.md documents how every field of a body is handled."""

import re

from api_page import PAGE, renewed

from controller.frontend.http.routes import ROUTES
from controller.frontend.openai.messages.models import MessagesBody
from controller.frontend.openai.request_models import ChatBody, CompletionBody
from controller.frontend.openai.responses.models import ResponsesBody
from controller.frontend.openai.tools.reasoning_formats import REASONING_FORMATS
from controller.frontend.openai.tools.tool_formats import TOOL_FORMATS


def test_the_tables_match_the_bodies_and_the_lists_of_refused_and_ignored_fields() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page) == page, "run `python tests/docs/api_page.py`"


def test_the_page_names_every_path() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert not [route for route in ROUTES if f"`{route.method} {route.path}`" not in page]


def test_every_field_has_a_description() -> None:
    for model in (ChatBody, CompletionBody, MessagesBody, ResponsesBody):
        assert not [name for name, field in model.model_fields.items() if not field.description]


def test_the_page_names_the_formats_of_tool_calls_and_of_reasoning() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for start, formats in (("- Tool calls:", TOOL_FORMATS), ("- Reasoning:", REASONING_FORMATS)):
        (line,) = [line for line in lines if line.strip().startswith(start)]
        assert re.findall(r"`([^`]+)`", line) == sorted(formats)
