"""Chat templates: render messages into one prompt.

A template is a program in the model's files. It runs in the sandbox of `jinja_environment`, which is imported with
the first template.

The API's messages differ from the messages that templates expect. Before rendering, they are converted as in vLLM's
chat endpoint:

- Text parts are joined with newlines, unless the template loops over a message's parts: then it receives the parts.
- A tool call's arguments are JSON text in the API, and an object in a template.
- A template that does not know the role `developer` receives `system` instead.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from events.errors import HoldfastError

ERROR_CHARS_MAX = 200  # characters quoted from a template's own error message
SOURCE_CHARS_MAX = 262_144  # the longest published templates have 30,000 characters
SIM_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# text messages of these roles are the same in the API and in every template's format
PLAIN_ROLES = frozenset({"user", "assistant", "system"})
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
Message = Mapping[str, object]
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of a model's templates, as in transformers


class BadTemplate(HoldfastError):
    """The model's chat template refused these messages."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The message format that a template expects, and the conversion of the API's messages to it."""

    parts: bool = False  # whether content may be a list of parts
    strings: bool = True  # whether content may be a string
    developer: bool = False  # whether the role `developer` is known

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the API's messages in this format. The given messages are not modified."""
        for message in messages:
            plain = len(message) == 2 and message.get("role") in PLAIN_ROLES
            if self.parts or not plain or type(message.get("content")) is not str:
                return [self._message(message) for message in messages]
        return list(messages)  # the common case

    def _message(self, message: Message) -> Message:
        changed: dict[str, object] = {}
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
        return {**message, **changed} if changed else message


def _with_object(call: object) -> object:
    """Return a tool call with its arguments as an object.

    Arguments that are not the JSON text of an object stay unchanged.
    """
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    if not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class ChatTemplate:
    """A compiled template with the values of its special tokens and its message format."""

    def __init__(
        self, source: str, specials: dict[str, str], with_tools: "ChatTemplate | None" = None
    ) -> None:
        """Compile `source`.

        If tools are given, `with_tools` is rendered instead. Raise BadTemplate if the source is invalid.
        """
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
        # All names are in one dict, copied once per rendering, because merging in Jinja2 takes longer than rendering
        # the template.
        self._default_names = {
            **self._template.globals,
            **specials,
            "add_generation_prompt": True,
            "tools": None,
        }
        self._template.globals = {}

    def reads(self, name: str) -> bool:
        """Return whether the template reads the variable `name`."""
        return name in self._reads

    def render(self, messages: Sequence[Message], /, **extra: object) -> str:
        """Render messages into a prompt, which ends where the assistant's answer begins. Raise BadTemplate for any error.

        `extra` comes from the client: it may contain any name, but cannot replace the messages.
        """
        if self._with_tools is not None and extra.get("tools"):
            return self._with_tools.render(messages, **extra)
        names = {**self._default_names, **extra, "messages": self._format.messages(messages)}
        self._environment.budget = self._budget()
        try:
            return "".join(self._template.root_render_func(self._template.new_context(names, shared=True)))
        except Exception as error:  # a template is a program: it may raise anything
            why = str(error)[:ERROR_CHARS_MAX]  # the text may quote the messages
            raise BadTemplate(f"the chat template refused these messages: {why}") from error


def load_template(folder: Path | None) -> ChatTemplate | None:
    """Return the chat template of a model's folder, or None if the model has none. Raise BadTemplate if it is invalid.

    Without a folder, return the template of the simulated engine.
    """
    if folder is None:
        return ChatTemplate(SIM_TEMPLATE, {})
    config = _config(folder / "tokenizer_config.json")
    sources, specials = _sources(folder, config), _specials(config)
    if DEFAULT not in sources:
        return None
    with_tools = ChatTemplate(sources[WITH_TOOLS], specials) if WITH_TOOLS in sources else None
    return ChatTemplate(sources[DEFAULT], specials, with_tools)


def _config(file: Path) -> dict[str, object]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadTemplate(f"{file} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _sources(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return the templates of a model by name, from the files in which transformers looks for templates."""
    given = config.get("chat_template")
    entries = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]
    sources = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    sources |= {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return {str(name): source for name, source in sources.items() if isinstance(source, str)}


def _specials(config: Mapping[str, object]) -> dict[str, str]:
    """Return the special tokens by name: the usual names, and the names that a model adds (`image_token`)."""
    more = config.get("extra_special_tokens")
    found = {name: config.get(name) for name in SPECIAL_NAMES} | (more if isinstance(more, dict) else {})
    names = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()
    }
    return {name: value for name, value in names.items() if isinstance(value, str)}
