"""Chat templates: from messages to one prompt.

A template is a program that comes with the model's files: it runs in `jinja_environment`'s sandbox, which is imported with
the first template.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from events.errors import HoldfastError

SAID_MAX = 200  # characters of what a template says that refuses
SIM_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class BadTemplate(HoldfastError):
    """The model's chat template refused these messages."""


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, specials: dict[str, str]) -> None:
        """Compile `source`. Raise BadTemplate."""
        from jinja2 import TemplateError

        from controller.frontend.text.jinja_environment import environment

        try:
            self._template = environment().from_string(source)
        except TemplateError as error:
            raise BadTemplate(f"the chat template does not compile: {error}") from error
        # All names in one dict, copied once for every rendering: Jinja2's own merging takes longer than the template
        self._usual = {**self._template.globals, **specials, "add_generation_prompt": True, "tools": None}
        self._template.globals = {}
        self._source = source
        self._reads: set[str] | None = None

    def reads(self, name: str) -> bool:
        """Say whether the template reads what is given to it under this name."""
        if self._reads is None:
            from jinja2.meta import find_undeclared_variables

            from controller.frontend.text.jinja_environment import environment

            self._reads = find_undeclared_variables(environment().parse(self._source))
        return name in self._reads

    def render(self, messages: Sequence[dict[str, Any]], /, **extra: Any) -> str:
        """Return the prompt that ends where the assistant begins. Raise BadTemplate, whatever went wrong.

        `extra` is the client's: it may bear any name, but the messages stay what they are.
        """
        names = {**self._usual, **extra, "messages": list(messages)}
        try:
            return "".join(self._template.root_render_func(self._template.new_context(names, shared=True)))
        except (
            Exception
        ) as error:  # a template is a program: fed with a client's values, it may raise anything
            said = str(error)[:SAID_MAX]  # it may quote them
            raise BadTemplate(f"the chat template refused these messages: {said}") from error


def load_template(folder: Path | None) -> ChatTemplate | None:
    """Return the chat template of a model's folder (None: the simulated engine's); None if it has none. Raise BadTemplate."""
    if folder is None:
        return ChatTemplate(SIM_TEMPLATE, {})
    config = _config(folder / "tokenizer_config.json")
    source = _source(folder, config)
    return ChatTemplate(source, _specials(config)) if source is not None else None


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadTemplate(f"{file} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _specials(config: dict[str, Any]) -> dict[str, str]:
    found = {name: config.get(name) for name in SPECIAL_NAMES}
    names = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()
    }
    return {name: value for name, value in names.items() if isinstance(value, str)}
