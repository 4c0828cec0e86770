"""The table of reasoning formats: the markers around a model's reasoning, and where it may occur.

A format's name is that of vLLM's `--reasoning-parser`. Harmony's channels are a tool format too: see `tool_formats`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    name: str
    start: tuple[str, ...]
    end: tuple[str, ...]
    opened: bool = False  # whether an answer begins with reasoning, unless its prompt has ended the reasoning
    anywhere: bool = False  # whether reasoning may also begin after content
    ended_by_call: bool = False  # whether a tool call ends the reasoning
    trim: bool = False  # whether white space at the reasoning's end belongs to the markers
    trim_content: bool = False  # whether line breaks before the content belong to the markers
    prose: bool = False  # whether the markers are ordinary words, which may also occur elsewhere
    channels: bool = False  # the whole output consists of messages on channels (harmony)
    template_hints: tuple[str, ...] = ()
    families: tuple[str, ...] = ()

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Return whether an answer to this prompt begins inside the reasoning."""
        tail = prompt[-200:].rstrip()
        if tail.endswith(self.start):
            return True
        return self.opened and not tail.endswith(self.end)


START, END = ("<think>",), ("</think>",)

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    one.name: one
    for one in (
        ReasoningFormat(
            name="openai_gptoss",
            start=(),
            end=(),
            channels=True,
            template_hints=("<|channel|>", "<|message|>"),
            families=("gpt-oss", "gpt_oss"),
        ),
        ReasoningFormat(
            name="seed_oss",
            start=("<seed:think>",),
            end=("</seed:think>",),
            opened=True,
            ended_by_call=True,
            template_hints=("<seed:think>",),
            families=("seed-oss", "seed_oss"),
        ),
        ReasoningFormat(
            name="mistral",
            start=("[THINK]", "<think>"),
            end=("[/THINK]", "</think>"),
            anywhere=True,
            ended_by_call=True,
            trim=True,
            template_hints=("[THINK]",),
            families=("magistral",),
        ),
        ReasoningFormat(
            name="granite",
            start=("Here is my thought process:", "Here's my thought process:"),
            end=("Here is my response:", "Here's my response:"),
            prose=True,
            template_hints=("Here is my thought process:",),
            families=("granite-3",),
        ),
        ReasoningFormat(
            name="kimi_k2",
            start=START,
            end=END,
            opened=True,
            ended_by_call=True,
            trim=True,
            template_hints=("<think>", "<|tool_calls_section_begin|>"),
            families=("kimi-k2-thinking",),
        ),
        ReasoningFormat(
            name="deepseek_v4",
            start=START,
            end=END,
            anywhere=True,
            ended_by_call=True,
            trim=True,
            template_hints=("<think>", "｜DSML｜"),
            families=("deepseek-v4", "deepseek-v3.2"),
        ),
        ReasoningFormat(
            name="deepseek_v3",
            start=START,
            end=END,
            template_hints=("<think>", "<｜tool▁calls▁begin｜>", "thinking"),
            families=("deepseek-v3",),
        ),
        ReasoningFormat(
            name="deepseek_r1",
            start=START,
            end=END,
            opened=True,
            template_hints=("</think>", "<｜Assistant｜>"),
            families=("deepseek-r1", "qwq"),
        ),
        ReasoningFormat(
            name="glm45",
            start=START,
            end=END,
            opened=True,
            anywhere=True,
            ended_by_call=True,
            trim=True,
            template_hints=("<think>", "[gMASK]<sop>"),
            families=("glm-4.5", "glm-4.6", "glm-4.7", "glm-5"),
        ),
        ReasoningFormat(
            name="minimax_m2",
            start=START,
            end=END,
            opened=True,
            ended_by_call=True,
            trim=True,
            template_hints=("<think>", "<minimax:tool_call>"),
            families=("minimax-m2",),
        ),
        ReasoningFormat(
            name="granite_thinking",
            start=START,
            end=END,
            opened=True,
            ended_by_call=True,
            trim=True,
            trim_content=True,
            families=("granite-4.2",),
        ),
        ReasoningFormat(
            name="nemotron_v3",
            start=START,
            end=END,
            opened=True,
            ended_by_call=True,
            trim=True,
            families=("nemotron-3",),
        ),
        ReasoningFormat(
            name="qwen3",
            start=START,
            end=END,
            opened=True,
            ended_by_call=True,
            template_hints=("<think>", "<|im_start|>"),
            families=("qwen3",),
        ),
    )
}


def choose_reasoning_format(chat_template: str, model: str = "") -> ReasoningFormat | None:
    """Return the format of the model's family, or else the first format that fits the chat template.

    A format fits if the template contains all of its `template_hints`. The family has precedence, because many families
    share the marker `<think>`. The family is recognised by the model's name. The family counts only if the template
    contains an end marker of the family's format (not required for harmony).
    """
    known = [
        (family, one)
        for one in REASONING_FORMATS.values()
        for family in one.families
        if family in model.lower() and (one.channels or any(end in chat_template for end in one.end))
    ]
    if known:
        return max(known, key=lambda pair: len(pair[0]))[1]
    for one in REASONING_FORMATS.values():
        if one.template_hints and all(hint in chat_template for hint in one.template_hints):
            return one
    return None
