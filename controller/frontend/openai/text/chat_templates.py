"""Chat templates: from messages to one prompt.

A template is a program that comes with the model's files: it runs in `jinja_environment`'s sandbox, which is imported with
the first template.

The API's messages are not quite what templates are written for. As vLLM's chat endpoint does, before rendering:

- Text parts are joined with newlines, unless the template loops over a message's parts: it gets the parts then.
- A tool call's arguments are JSON text in the API, and an object in a template.
- A template that does not know the role `developer` gets `system` in its place.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from events.errors import HoldfastError

SAID_MAX = 200  # characters of a template's own error message
SOURCE_CHARS_MAX = 262_144  # the longest published ones have 30,000
SIM_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PLAIN_ROLES = frozenset({"user", "assistant", "system"})  # a text of theirs is the same in each form
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
DEFAULT, WITH_TOOLS = "default", "tool_use"  # a model's templates, as transformers names them


class BadTemplate(HoldfastError):
    """The model's chat template refused these messages."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """What one template expects of a message."""

    parts: bool = False  # its content as a list of parts, where a client sends one
    strings: bool = True  # its content as a string, where a client sends one
    developer: bool = False  # the role `developer`

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the API's messages in this form. The given ones stay as they are."""
        for message in messages:
            plain = len(message) == 2 and message.get("role") in PLAIN_ROLES
            if self.parts or not plain or type(message.get("content")) is not str:
                return [self._message(message) for message in messages]
        return list(messages)  # nearly always

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        content = message.get("content")
        if isinstance(content, list):
            if not self.parts:
                changed["content"] = "\n".join(part["text"] for part in content)
        elif self.parts and not self.strings and isinstance(content, str):
            changed["content"] = [{"type": "text", "text": content}]
        if message.get("role") == "developer" and not self.developer:
            changed["role"] = "system"
        if isinstance(calls := message.get("tool_calls"), list):
            changed["tool_calls"] = [_with_object(call) for call in calls]
        return message | changed if changed else message


def _with_object(call: Any) -> Any:
    """Return a tool call whose arguments are an object. What is not the JSON text of one stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class ChatTemplate:
    """One compiled template, the special tokens that it may name, and the form in which it takes messages."""

    def __init__(
        self, source: str, specials: dict[str, str], with_tools: "ChatTemplate | None" = None
    ) -> None:
        """Compile `source`. `with_tools` renders in its place where tools are given. Raise BadTemplate."""
        from jinja2 import TemplateError
        from jinja2.meta import find_undeclared_variables

        from controller.frontend.openai.text import jinja_environment as jinja

        if len(source) > SOURCE_CHARS_MAX:
            raise BadTemplate(f"the chat template has more than {SOURCE_CHARS_MAX:,} characters")
        self._environment, self._budget = jinja.ChatEnvironment(), jinja.RenderingBudget
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
            self._reads = find_undeclared_variables(tree)
        except (TemplateError, RecursionError) as error:
            raise BadTemplate(f"the chat template does not compile: {error}") from error
        self._format = MessageFormat(*jinja.format_of(tree))
        self._with_tools = with_tools
        # All names in one dict, copied once for every rendering: Jinja2's own merging takes longer than the template
        self._usual = {**self._template.globals, **specials, "add_generation_prompt": True, "tools": None}
        self._template.globals = {}

    def reads(self, name: str) -> bool:
        """Return whether the template reads what is given to it under this name."""
        return name in self._reads

    def render(self, messages: Sequence[dict[str, Any]], /, **extra: Any) -> str:
        """Return the prompt that ends where the assistant begins. Raise BadTemplate, whatever went wrong.

        `extra` is the client's: it may bear any name, but the messages stay what they are.
        """
        if self._with_tools is not None and extra.get("tools"):
            return self._with_tools.render(messages, **extra)
        names = {**self._usual, **extra, "messages": self._format.messages(messages)}
        self._environment.budget = self._budget()
        try:
            return "".join(self._template.root_render_func(self._template.new_context(names, shared=True)))
        except Exception as error:  # a template is a program: it may raise anything
            said = str(error)[:SAID_MAX]  # it may quote them
            raise BadTemplate(f"the chat template refused these messages: {said}") from error


def load_template(folder: Path | None) -> ChatTemplate | None:
    """Return the chat template of a model's folder (None: the simulated engine's); None if it has none. Raise BadTemplate."""
    if folder is None:
        return ChatTemplate(SIM_TEMPLATE, {})
    config = _config(folder / "tokenizer_config.json")
    sources, specials = _sources(folder, config), _specials(config)
    if DEFAULT not in sources:
        return None
    with_tools = ChatTemplate(sources[WITH_TOOLS], specials) if WITH_TOOLS in sources else None
    return ChatTemplate(sources[DEFAULT], specials, with_tools)


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadTemplate(f"{file} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return a model's templates by name, from where transformers looks for them."""
    given = config.get("chat_template")
    entries = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]
    sources = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    sources |= {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return {str(name): source for name, source in sources.items() if isinstance(source, str)}


def _specials(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that have names: the usual ones, and those that a model adds (`image_token`)."""
    more = config.get("extra_special_tokens")
    found = {name: config.get(name) for name in SPECIAL_NAMES}
    found |= more if isinstance(more, dict) else {}
    names = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()
    }
    return {name: value for name, value in names.items() if isinstance(value, str)}
