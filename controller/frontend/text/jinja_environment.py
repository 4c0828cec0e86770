"""The Jinja2 environment that model makers write chat templates for, in the sandbox: a template comes with the model's files.

Trimmed blocks, loop controls, `tojson`, `raise_exception`, `strftime_now`, as Hugging Face's transformers have them.
Imported with the first template: who only counts tokens needs no Jinja2.
"""

import json
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def environment() -> ImmutableSandboxedEnvironment:
    """Return a new environment."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _strftime_now
    return made


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now(UTC).strftime(format)  # noqa: TID251 (a date for the prompt, not an order)
