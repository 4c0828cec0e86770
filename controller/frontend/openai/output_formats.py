"""Chooses the formats of a model's reasoning and tool calls, and the parser of an answer.

The formats are recognised from the model's chat template and name, unless an operator has set them.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import structlog

from controller.frontend.errors import unsupported
from controller.frontend.openai.request_parser import ParsedRequest, ToolUse
from controller.frontend.openai.text.tokenizer import Tokens
from controller.frontend.openai.tools.output_parser import OutputParser
from controller.frontend.openai.tools.reasoning_formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    choose_reasoning_format,
)
from controller.frontend.openai.tools.tool_formats import (
    REQUIRED,
    TOOL_FORMATS,
    ToolFormat,
    choose_tool_format,
)
from events.errors import UsageError

log = structlog.get_logger(__name__)

REPORT_AFTER_S = 60.0
SHOWN_MAX = 8  # models in a log line
NONE = "none"  # the setting of a model with text that is content, whatever it looks like


class OutputFormats(NamedTuple):
    """The formats in which one model writes tool calls and reasoning; None for a format that it does not have."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


class FormatTable:
    """The formats of all models, each chosen when it is first needed.

    The settings may name a model that is served later, so a name without a served model is no error. It is logged once.
    """

    def __init__(self, tools: Mapping[str, str], reasoning: Mapping[str, str]) -> None:
        """Start with the formats that the settings name for some models. Raise UsageError for an unknown format name."""
        _check_names("tool_call_parsers", tools, TOOL_FORMATS)
        _check_names("reasoning_parsers", reasoning, REASONING_FORMATS)
        self._set = tools, reasoning
        self._report_at: float | None = (
            None  # when names without a served model are logged; None: not known yet
        )
        self._reported = False
        self._known: dict[tuple[str, Tokens], OutputFormats] = {}

    def of(self, model: str, tokens: Tokens) -> OutputFormats:
        """Return the formats of a model with this tokenizer."""
        found = self._known.get((model, tokens))
        if found is None:
            found = self._known[model, tokens] = self._choose(model, tokens)
        return found

    def report_unserved(self, served: Collection[str], now: float) -> None:
        """Log the models in the settings that no worker serves, once, a minute after the first model is served.

        Called every second. `now` is in monotonic seconds.
        """
        if self._reported or not served:
            return
        if self._report_at is None:
            self._report_at = now + REPORT_AFTER_S
        if now < self._report_at:
            return
        self._reported = True
        for setting, formats in zip(("tool_call_parsers", "reasoning_parsers"), self._set, strict=True):
            for model in sorted(formats.keys() - set(served)):
                log.warning(
                    "format_of_unserved_model",
                    setting=setting,
                    model=model,
                    served=sorted(served)[:SHOWN_MAX],
                    hint="the setting takes a model's own name, as in /v1/models without root; correct or remove the entry",
                )

    def _choose(self, model: str, tokens: Tokens) -> OutputFormats:
        template, (tools, reasoning) = tokens.template.source if tokens.template else "", self._set
        return OutputFormats(
            TOOL_FORMATS.get(tools[model]) if model in tools else choose_tool_format(template, model),
            REASONING_FORMATS.get(reasoning[model])
            if model in reasoning
            else choose_reasoning_format(template, model),
        )


def _check_names(setting: str, formats: Mapping[str, str], known: Mapping[str, object]) -> None:
    for model, name in formats.items():
        if name not in known and name != NONE:
            names = ", ".join(sorted((*known, NONE)))
            raise UsageError(f"{setting}: {model}={name}: there is no such format; use one of {names}")


def check_formats(use: ToolUse, formats: OutputFormats) -> None:
    """Raise ApiError (400) if the model's formats do not support the request's `tool_choice`."""
    if use.choice == "auto" and formats.tools is None:
        why = "the format of this model's tool calls is not known; an operator can set tool_call_parsers"
        raise unsupported("tools", why)
    if use.choice != "auto" and formats.tools is not None and formats.tools.channels:
        raise unsupported(
            "tool_choice", f"this model's format ({formats.tools.name}) only allows auto and none"
        )


def is_parsed(parsed: ParsedRequest, formats: OutputFormats) -> bool:
    """Return whether answers to the request must be parsed, because they may contain reasoning or tool calls."""
    return parsed.chat and (parsed.tool_use is not None or formats.reasoning is not None)


def parser_of(parsed: ParsedRequest, formats: OutputFormats, prompt: str, answer: str) -> OutputParser:
    """Return the parser of one answer. `prompt` is the answer's prompt as text.

    `answer` is an id of the answer, from which the ids of its tool calls are derived.
    """
    use, reasoning = parsed.tool_use, formats.reasoning
    tools = None
    if use is not None:
        tools = REQUIRED if use.choice == "required" else formats.tools or REQUIRED
    return OutputParser(
        tools,
        reasoning,
        tools=use.schemas if use is not None else None,
        in_reasoning=reasoning is not None and reasoning.begins_in_reasoning(prompt),
        named=use.name if use is not None else "",
        id_seed=answer,
    )
