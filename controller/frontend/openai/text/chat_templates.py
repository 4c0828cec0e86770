"""Chat templates: render messages into one prompt.

A template is a program in the model's files. It runs in the sandbox of `jinja_environment`, which is imported with
the first template.

The API's messages differ from the messages that templates expect. Before rendering, the API's messages are converted as
in vLLM's chat endpoint:

- Text parts are joined with newlines, unless the template loops over a message's parts. Such a template receives the parts.
- A tool call's arguments are JSON text in the API, and an object in a template.
- A template that does not know the role `developer` receives `system` instead.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from events.errors import HoldfastError

CONFIG_FILE = "tokenizer_config.json"
ERROR_CHARS_MAX = 200  # characters quoted from a template's own error message
SOURCE_CHARS_MAX = 262_144  # the longest published templates have 30,000 characters
SIM_TEMPLATE = (
    "{# Calls are written as <tool_call>{...}</tool_call>. #}"
    "{% if tools and tool_choice != 'none' %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# text messages of these roles are the same in the API and in every template's format
PLAIN_ROLES = frozenset({"user", "assistant", "system"})
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
        """Compile the template `source`. Raise BadTemplate if `source` is invalid.

        `specials` maps the names of special tokens to their texts. For a request with tools, `with_tools` is rendered
        instead of this template.
        """
        from jinja2 import TemplateError
        from jinja2.meta import find_undeclared_variables

        from controller.frontend.openai.text import jinja_environment as jinja

        if len(source) > SOURCE_CHARS_MAX:
            raise BadTemplate(f"the chat template has more than {SOURCE_CHARS_MAX:,} characters")
        self.source: str = source + (with_tools.source if with_tools is not None else "")
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

    def render_continued(self, messages: Sequence[Message], /, **extra: object) -> str:
        """Render messages into a prompt that ends with the text of the last message, so that the answer continues it.

        Raise BadTemplate if the last message has no text. Also raise it if the template refuses the messages, or does
        not write the last one unchanged.
        """
        content = messages[-1].get("content") if messages else None
        if isinstance(content, list):
            content = content[-1].get("text") if content else None
        if not isinstance(content, str) or not content.strip():
            raise BadTemplate("the last message has no text that could be continued")
        rendered = self.render(messages, **{**extra, "add_generation_prompt": False})
        start = rendered.rfind(content.strip())
        if start < 0:
            raise BadTemplate("the chat template changes the last message, so that it cannot be continued")
        exact = content.lstrip()  # the template may have removed the white space at its end
        return rendered[: start + len(exact if rendered.startswith(exact, start) else content.strip())]


def load_template(folder: Path | None) -> ChatTemplate | None:
    """Return the chat template of a model's folder, or None if the model has none.

    If `folder` is None, return the template of the simulated engine. Raise BadTemplate if the template is invalid.
    """
    if folder is None:
        return ChatTemplate(SIM_TEMPLATE, {})
    config, specials = _config(folder / CONFIG_FILE), special_names(folder)
    sources = _sources(folder, config)
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


def special_names(folder: Path) -> dict[str, str]:
    """Return a model's special tokens by name: those in SPECIAL_NAMES, and its own ones, such as `image_token`.

    Raise BadTemplate if the model's configuration cannot be read.
    """
    config = _config(folder / CONFIG_FILE)
    more = config.get("extra_special_tokens")
    found = {name: config.get(name) for name in SPECIAL_NAMES} | (more if isinstance(more, dict) else {})
    names = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()
    }
    return {name: value for name, value in names.items() if isinstance(value, str)}
