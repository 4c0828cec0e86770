"""The table of tool-call formats: the markers of each, and how it writes a call's name and arguments.

A format's name is that of vLLM's `--tool-call-parser`. The parser uses the fields up to `alphanumeric_ids`, and the
renderer the templates after this field. To add a format, add a row; a new syntax also needs a method of `CallReader`.
"""

import re
from dataclasses import dataclass

DSML = "｜DSML｜"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTags:
    """The tags of a call that has one tag for each parameter. The function's name follows the format's `call_start`."""

    name_end: str  # "" if the first parameter's tag ends the name
    start: str  # before a parameter's name
    # Between a parameter's name and value, and whether the value is a string (None: the tool's schema tells).
    separators: tuple[tuple[str, bool | None], ...]
    end: str
    trim_newlines: bool = False  # whether one newline on each side of a value belongs to the tags


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    section_start: tuple[str, ...] = ()  # before all calls
    section_end: str = ""
    call_start: tuple[str, ...] = ()
    call_end: str = ""
    bare_calls: bool = False  # whether a call may begin outside a section
    leading: str = ""  # a character that begins calls if it is the first visible one of the content
    separator: str = ""  # between JSON objects without `call_start`
    header: re.Pattern[str] | None = (
        None  # the function's name (and the call's id) if these precede the arguments
    )
    header_ends: tuple[str, ...] = ()
    strict_keys: bool = False  # whether a JSON object with an unexpected key is content
    arguments_optional: bool = False  # whether a JSON object without arguments is a call
    pythonic: bool = False  # calls are a Python list of call expressions
    channels: bool = False  # the whole output consists of messages on channels (harmony)
    tags: ParameterTags | None = None
    alphanumeric_ids: bool = False  # whether call ids are nine letters and digits
    # Templates of the renderer, for `str.format`
    section: str = "{calls}"
    call: str = ""
    between: str = "\n"
    # Recognition: text that the chat template must contain, and parts of model names
    template_hints: tuple[str, ...] = ()
    families: tuple[str, ...] = ()

    def openers(self) -> tuple[str, ...]:
        """Return the markers that begin a call or a section within content."""
        return (*self.section_start, *(self.call_start if self.bare_calls or not self.section_start else ()))


JSON_CALL = '{{"name": {json_name}, "arguments": {arguments}}}'

QWEN3_TAGS = ParameterTags(
    name_end=">",
    start="<parameter=",
    separators=((">", None),),
    end="</parameter>",
    trim_newlines=True,
)
DSML_TAGS = ParameterTags(
    name_end='">',
    start=f'<{DSML}parameter name="',
    separators=(('" string="true">', True), ('" string="false">', False), ('">', False)),
    end=f"</{DSML}parameter>",
)

QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    section_start=("<tool_call>",),
    section_end="</tool_call>",
    call_start=("<function=",),
    call_end="</function>",
    bare_calls=True,
    tags=QWEN3_TAGS,
    section="<tool_call>\n{calls}\n</tool_call>",
    between="\n</tool_call>\n<tool_call>\n",
    template_hints=("<tool_call>", "<function="),
    families=("qwen3-coder", "qwen3_coder", "qwen3-next-coder", "qwen3.5", "nemotron-3", "granite-4.2"),
)


def _dsml(
    name: str, section: str, hints: tuple[str, ...], families: tuple[str, ...], *more: str
) -> ToolFormat:
    """Return a DeepSeek format with DSML tags.

    `section` is the name of the tag around all calls. A model may open these calls with a tag named in `more` instead.
    `hints` and `families` become the format's `template_hints` and `families`.
    """
    return ToolFormat(
        name=name,
        section_start=(f"<{DSML}{section}>", *(f"<{DSML}{other}>" for other in more)),
        section_end=f"</{DSML}{section}>",
        call_start=(f'<{DSML}invoke name="',),
        call_end=f"</{DSML}invoke>",
        bare_calls=True,
        tags=DSML_TAGS,
        section=f"<{DSML}{section}>\n{{calls}}\n</{DSML}{section}>",
        template_hints=hints,
        families=families,
    )


TOOL_FORMATS: dict[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat(
            name="openai",
            channels=True,
            template_hints=("<|channel|>", "<|message|>"),
            families=("gpt-oss", "gpt_oss"),
        ),
        ToolFormat(
            name="kimi_k2",
            section_start=("<|tool_calls_section_begin|>",),
            section_end="<|tool_calls_section_end|>",
            call_start=("<|tool_call_begin|>",),
            call_end="<|tool_call_end|>",
            header=re.compile(r"(?P<id>(?:functions\.)?(?P<name>[^:\s]+):\d+)"),
            header_ends=("<|tool_call_argument_begin|>",),
            section="<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>",
            call="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            between="",
            template_hints=("<|tool_calls_section_begin|>",),
            families=("kimi-k2", "kimi_k2"),
        ),
        _dsml("deepseek_v32", "function_calls", (f"{DSML}function_calls",), ("deepseek-v3.2",)),
        _dsml("deepseek_v4", "tool_calls", (f"{DSML}tool_calls",), ("deepseek-v4",), "toolcalls", "tool"),
        ToolFormat(
            name="deepseek_v3",
            section_start=("<｜tool▁calls▁begin｜>",),
            section_end="<｜tool▁calls▁end｜>",
            call_start=("<｜tool▁call▁begin｜>",),
            call_end="<｜tool▁call▁end｜>",
            header=re.compile(r"[^<]*<｜tool▁sep｜>(?P<name>\S+)"),
            header_ends=("\n```json\n",),
            section="<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
            call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
            template_hints=("<｜tool▁calls▁begin｜>", "```json"),
            families=("deepseek-v3", "deepseek-r1"),
        ),
        ToolFormat(
            name="deepseek_v31",
            section_start=("<｜tool▁calls▁begin｜>",),
            section_end="<｜tool▁calls▁end｜>",
            call_start=("<｜tool▁call▁begin｜>",),
            call_end="<｜tool▁call▁end｜>",
            header=re.compile(r"(?P<name>\S+)"),
            header_ends=("<｜tool▁sep｜>",),
            section="<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
            call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
            between="",
            template_hints=("<｜tool▁calls▁begin｜>",),
            families=("deepseek-v3.1",),
        ),
        ToolFormat(
            name="seed_oss",
            section_start=("<seed:tool_call>",),
            section_end="</seed:tool_call>",
            call_start=("<function=",),
            call_end="</function>",
            bare_calls=True,
            tags=QWEN3_TAGS,
            section="<seed:tool_call>\n{calls}\n</seed:tool_call>",
            between="\n</seed:tool_call>\n<seed:tool_call>\n",
            template_hints=("<seed:tool_call>",),
            families=("seed-oss", "seed_oss"),
        ),
        ToolFormat(
            name="minimax_m2",
            section_start=("<minimax:tool_call>",),
            section_end="</minimax:tool_call>",
            call_start=('<invoke name="',),
            call_end="</invoke>",
            bare_calls=True,
            tags=ParameterTags(
                name_end='">',
                start='<parameter name="',
                separators=(('">', None),),
                end="</parameter>",
            ),
            section="<minimax:tool_call>\n{calls}\n</minimax:tool_call>",
            template_hints=("<minimax:tool_call>",),
            families=("minimax-m2",),
        ),
        ToolFormat(
            name="glm45",
            call_start=("<tool_call>",),
            call_end="</tool_call>",
            tags=ParameterTags(
                name_end="",
                start="<arg_key>",
                separators=(("</arg_key>\n<arg_value>", None), ("</arg_key><arg_value>", None)),
                end="</arg_value>",
            ),
            template_hints=("<tool_call>", "<arg_key>"),
            families=("glm-4.5", "glm-4.6", "glm-4.7", "glm-5"),
        ),
        QWEN3_CODER,
        ToolFormat(
            name="mistral",
            call_start=("[TOOL_CALLS]",),
            header=re.compile(r"(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>\w+))?"),
            header_ends=("[ARGS]", "{"),
            arguments_optional=True,
            alphanumeric_ids=True,
            call="[TOOL_CALLS]{name}[ARGS]{arguments}",
            between="",
            template_hints=("[TOOL_CALLS]",),
            families=("mistral", "mixtral", "magistral", "ministral", "devstral", "codestral"),
        ),
        ToolFormat(
            name="granite",
            call_start=("<|tool_call|>", "<tool_call>"),
            section="<|tool_call|>[{calls}]",
            call=JSON_CALL,
            between=", ",
            template_hints=("<|tool_call|>",),
            families=("granite-3",),
        ),
        ToolFormat(
            name="granite-20b-fc",
            call_start=("<function_call>",),
            call="<function_call> " + JSON_CALL,
            between="",
            template_hints=("<function_call>",),
            families=("granite-20b-functioncalling",),
        ),
        ToolFormat(
            name="granite4",
            call_start=("<tool_call>",),
            call_end="</tool_call>",
            call="<tool_call>\n" + JSON_CALL + "\n</tool_call>",
            families=("granite-4",),
        ),
        ToolFormat(
            name="hermes",
            call_start=("<tool_call>",),
            call_end="</tool_call>",
            call="<tool_call>\n" + JSON_CALL + "\n</tool_call>",
            template_hints=("<tool_call>",),
            families=("hermes", "qwen2.5", "qwen3", "qwq"),
        ),
        ToolFormat(
            name="llama4_pythonic",
            call_start=("<|python_start|>",),
            call_end="<|python_end|>",
            leading="[",
            pythonic=True,
            section="<|python_start|>[{calls}]<|python_end|>",
            between=", ",
            template_hints=("<|python_start|>", "[func_name1("),
        ),
        ToolFormat(
            name="pythonic",
            leading="[",
            pythonic=True,
            section="[{calls}]",
            between=", ",
            template_hints=("[func_name1(",),
        ),
        ToolFormat(
            name="llama3_json",
            call_start=("<|python_tag|>",),
            leading="{",
            separator=";",
            strict_keys=True,
            call='{{"name": {json_name}, "parameters": {arguments}}}',
            between="; ",
            template_hints=('"parameters": ', "ipython"),
            families=("llama-3", "llama-4"),
        ),
    )
}


REQUIRED = ToolFormat(
    name="required",
    leading="[",
    section="[{calls}]",
    call='{{"name": {json_name}, "parameters": {arguments}}}',
    between=", ",
)
"""The format of `tool_choice: required`, whatever the model: an array of calls, which the constraint enforces."""


def choose_tool_format(chat_template: str, model: str = "") -> ToolFormat | None:
    """Return the first format that fits the chat template, or else the format of the model's family.

    A format fits if the template contains all of its `template_hints`. Specific formats come first in the table. This
    function is not called for a model with a format that an operator has set.
    """
    for one in TOOL_FORMATS.values():
        if one.template_hints and all(hint in chat_template for hint in one.template_hints):
            return one
    known = [
        (family, one) for one in TOOL_FORMATS.values() for family in one.families if family in model.lower()
    ]
    return max(known, key=lambda pair: len(pair[0]))[1] if known else None
