"""Examples of each reasoning format, and where reasoning begins and ends."""

from pathlib import Path

import pytest
from output_parsing import parse

from controller.frontend.openai.tools.reasoning_formats import REASONING_FORMATS, choose_reasoning_format

TEMPLATES = Path(__file__).parent.parent / "text" / "chat_templates"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("reasoning", "in_reasoning", "text", "thought", "content"),
    [
        ("deepseek_r1", True, "hm\n</think>\n\nHi", "hm\n", "\n\nHi"),
        ("deepseek_r1", True, "<think>\nhm</think>Hi", "\nhm", "Hi"),
        ("deepseek_r1", True, "cut off", "cut off", ""),
        ("deepseek_v3", False, "Hi", "", "Hi"),
        ("deepseek_v3", False, "<think>hm</think>Hi", "hm", "Hi"),
        ("qwen3", True, "<think>\nhm\n</think>\n\nHi <think> </think>", "\nhm\n", "\n\nHi <think> </think>"),
        ("qwen3", False, "Hi", "", "Hi"),
        ("qwen3", True, "hm</think></think>Hi", "hm", "Hi"),
        ("kimi_k2", True, "hm \n</think>Hi", "hm", "Hi"),
        ("seed_oss", True, "<seed:think>hm</seed:think>Hi", "hm", "Hi"),
        ("mistral", False, "[THINK]hm[/THINK]Hi [THINK]more[/THINK]there", "hmmore", "Hi there"),
        ("mistral", False, "<think>hm</think>Hi", "hm", "Hi"),
        ("granite", False, "Here is my thought process:hm Here is my response:Hi", "hm ", "Hi"),
        ("granite", False, "Here's my thought process: hm Here's my response: Hi", " hm ", " Hi"),
        ("granite", False, "Here is my answer: Hi", "", "Here is my answer: Hi"),
        ("granite", False, "Here is my response: Hi", "", "Here is my response: Hi"),
        ("glm45", True, "<think>hm</think>\nHi", "hm", "\nHi"),
        ("granite_thinking", True, "hm\n</think>\nHi", "hm", "Hi"),
        ("openai_gptoss", False, f"{ANALYSIS}hm<|end|>{FINAL}Hi", "hm", "Hi"),
        ("openai_gptoss", False, f"<|channel|>commentary<|message|>Wait<|end|>{FINAL}Hi", "", "WaitHi"),
        ("openai_gptoss", False, "<|channel|>analysis to=python<|message|>1+1<|call|>", "1+1", ""),
        ("openai_gptoss", False, "no header at all", "", "no header at all"),
    ],
)  # fmt: skip
def test_reasoning_and_content(
    reasoning: str, in_reasoning: bool, text: str, thought: str, content: str
) -> None:
    parsed = parse(text, reasoning=reasoning, in_reasoning=in_reasoning)
    assert (parsed.output.reasoning, parsed.output.content, parsed.reason) == (thought, content, "stop")


@pytest.mark.parametrize("reasoning", ["qwen3", "nemotron_v3"])
def test_a_call_ends_the_reasoning(reasoning: str) -> None:
    parsed = parse(f"hm{CALL}", "hermes", reasoning=reasoning, in_reasoning=True)
    assert (parsed.output.reasoning, parsed.calls()) == ("hm", [("f", "{}")])


def test_a_call_inside_the_reasoning_of_deepseek_r1_is_reasoning() -> None:
    parsed = parse(f"hm{CALL}</think>", "hermes", reasoning="deepseek_r1", in_reasoning=True)
    assert (parsed.output.reasoning, parsed.calls()) == (f"hm{CALL}", [])


def test_white_space_between_reasoning_and_a_call_is_dropped() -> None:
    parsed = parse(f"hm</think>\n\n{CALL}\n", "hermes", reasoning="qwen3", in_reasoning=True)
    assert (parsed.output.content, parsed.calls()) == ("", [("f", "{}")])


def test_a_leading_object_after_reasoning_is_a_call() -> None:
    text = '<think>hm</think>\n\n{"name": "f", "parameters": {}}'
    parsed = parse(text, "llama3_json", reasoning="deepseek_v3")
    assert (parsed.output.reasoning, parsed.output.content, parsed.calls()) == ("hm", "", [("f", "{}")])


@pytest.mark.parametrize(
    ("reasoning", "prompt", "begins"),
    [
        ("qwen3", "<|im_start|>assistant\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_v3", "<｜Assistant｜>", False),
        ("deepseek_v3", "<｜Assistant｜><think>", True),
        ("mistral", "[/INST]", False),
    ],
)
def test_the_end_of_the_prompt_tells_whether_an_answer_begins_in_the_reasoning(
    reasoning: str, prompt: str, begins: bool
) -> None:
    assert REASONING_FORMATS[reasoning].begins_in_reasoning(prompt) == begins


@pytest.mark.parametrize("template", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_the_chat_template_chooses_the_reasoning_format(template: str) -> None:
    chosen = choose_reasoning_format((TEMPLATES / f"{template}.jinja").read_text())
    expected = {"gpt_oss_harmony": "openai_gptoss", "qwen3_thinking": "qwen3"}.get(template)
    assert (chosen.name if chosen else None) == expected


@pytest.mark.parametrize(
    ("template", "model", "name"),
    [
        ("{% if '</think>' in content %}", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseek_r1"),
        ("{% if thinking %}<think>{% else %}</think>{% endif %}", "deepseek-ai/DeepSeek-V3.1", "deepseek_v3"),
        ("no reasoning", "Qwen/Qwen3-30B-A3B-Instruct-2507", None),
        ("<think>\n</think>", "moonshotai/Kimi-K2-Thinking", "kimi_k2"),
    ],
)
def test_the_model_name_chooses_among_formats_with_the_same_markers(
    template: str, model: str, name: str | None
) -> None:
    chosen = choose_reasoning_format(template, model)
    assert (chosen.name if chosen else None) == name
