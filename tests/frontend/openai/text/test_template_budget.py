"""A chat template that would never end, or use all memory, is stopped.

It comes with a model's files, and a compromised worker may register any folder.
"""

from collections.abc import Callable

import pytest

from controller.frontend.openai.text.chat_templates import (
    SOURCE_CHARS_MAX,
    BadTemplate,
    ChatTemplate,
    MessageFormat,
)
from controller.frontend.openai.text.jinja_environment import (
    STEPS_MAX,
    ChatEnvironment,
    OverBudget,
    RenderingBudget,
)

SAID = [{"role": "user", "content": "hi"}]
MANY = "{% for i in range(99999) %}"
ENDLESS = [
    MANY + MANY + "{% endfor %}{% endfor %}",
    MANY + "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for a in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    MANY + "{{ range(99999) | list | length }}{% endfor %}",
    MANY + "{{ range(99999) | map('string') | list | length }}{% endfor %}",
    MANY + "{{ range(99999) | sort | length }}{% endfor %}",
    MANY + "{{ 1 in range(99999) | list }}{% endfor %}",
    "{% set l = range(99999) | list %}" + MANY + "{{ -1 in l }}{% endfor %}",
    "{% set l = range(99999) | list %}" + MANY + "{{ l[::-1][1:] }}{% endfor %}",
    "{% set s = 'ab' * 99999 %}" + MANY + "{{ s == s ~ 'x' }}{{ s | upper }}{{ s.lower() }}{% endfor %}",
]
HUGE = [
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * [1] }}",
    "{{ 9**9**9 }}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x' | center(10**9) }}",
    "{{ 'x\ny' | indent(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{0:{1}}'.format(1, 1000000000) }}",
    "{{ (['x' * 1000000] * 1000) | join }}",
    "{{ ''.join(['x' * 1000000] * 1000) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ 'abc'.translate({97: 'x' * 99999}) }}",
    "{{ strftime_now('%9999999999Y') }}",
    "{{ 'x'.encode() * 10**9 }}",
    "{{ (5).to_bytes(10**9) }}",
    "{% set b %}{% for i in range(9999) %}xxxxxxxxxxxxx{% endfor %}{% endset %}"
    + MANY
    + "{{ b }}{% endfor %}",
]


NESTED = "{% set a = [1] * 9999 %}{% set b = [a] * 9999 %}"  # 100 million values in 20,000 references
LONG_TEXT = "{% set s = 'ab' * 999999 %}"
LONG_OPERATIONS = [
    *(
        NESTED + f"{{{{ {use} }}}}"
        for use in (
            "b", "b ~ ''", "b | tojson", "b | string", "b | upper", "b | join", "'%s' % b", "'%s' | format(b)",
            "'{}'.format(b)", "''.join([b])", "b == [a] * 9999", "b < b", "a in b", "b is eq(b)", "a is in(b)",
            "b.index(1)", "b | sort", "b | unique", "b | max", "raise_exception(b)", "{'k': b}.values()",
            "namespace(x=b)", "[b] | selectattr(0, 'eq', b) | list",
        )
    ),
    *(
        LONG_TEXT + f"{{{{ {use} }}}}"
        for use in (
            "s.rfind('ab' * 99999)", "s.strip('cd' * 99999)", "s | trim('cd' * 99999)", "s.rsplit('ab' * 9999)",
            "s | urlencode", "s | title", "s | wordcount", "s | list", "s | sort | length", "s.split('a')",
            "s.startswith((s,) * 99999)", "('%s' * 999) % ((s,) * 999)", "('{0}' * 999).format(s)",
        )
    ),
    "{{ ('\n' * 999999) | indent(1000) }}",
    "{{ ('\t' * 999999).expandtabs(1000) }}",
    "{{ [1] | tojson(indent=1000) }}",
    "{{ [[1] * 99999] | tojson(indent=4) | length }}" * 9,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("source", LONG_OPERATIONS)
def test_no_single_operation_takes_long(source: str) -> None:
    """It would block the event loop beyond the time of a rendering: the clock is read only between operations."""
    with pytest.raises(BadTemplate, match=r"one operation|nests|indent of more|width"):
        ChatTemplate(source, {}).render(SAID)


def test_a_message_as_long_as_the_longest_context_is_rendered() -> None:
    """Four million characters are a million tokens."""
    content = "word " * 800_000
    source = (
        "{% for m in messages[0:] %}{% if 'content' in m and 'tool' not in m.content %}"
        "{{ '<|' ~ m.role ~ '|>' + m.content | trim ~ '<|end|>' }}{{ m.content.split('</think>')[-1] }}"
        "{% endif %}{% endfor %}"
    )
    text = ChatTemplate(source, {}).render([{"role": "user", "content": content}])
    assert text == f"<|user|>{content.strip()}<|end|>{content}"


@pytest.mark.slow
@pytest.mark.parametrize("source", ENDLESS + HUGE)
def test_a_template_is_stopped_before_it_uses_too_much_time_or_memory(source: str) -> None:
    with pytest.raises(BadTemplate, match=r"more than|digits|not allowed|recursion"):
        ChatTemplate(source, {}).render(SAID)


def test_a_template_can_be_rendered_again_after_it_was_stopped() -> None:
    template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}done", {})
    with pytest.raises(BadTemplate, match="more than"):
        template.render(SAID, n=9999)
    assert template.render(SAID, n=9) == "done"


def timed(clock: Callable[[], float]) -> RenderingBudget:
    """Return a budget that uses this clock."""

    class Timed(RenderingBudget):
        def now(self) -> float:
            return clock()

    return Timed()


def test_time_is_limited_even_if_steps_take_long() -> None:
    """A rendering of slow steps, of 1 ms each by this clock, ends at most 64 steps after its time."""
    now = 0.0
    budget = timed(lambda: now)
    with pytest.raises(OverBudget, match=r"more than 0\.25 s"):
        for _ in range(STEPS_MAX // 2):
            now += 0.001
            budget.spend(1)
    assert now <= 0.25 + 2 * 0.065


def test_the_clock_is_read_before_each_large_operation() -> None:
    """By this clock 1,000 characters take 10 ms."""
    now = 0.0
    template = ChatTemplate("{% for i in range(9999) %}{{ slow(i) }}{{ s | upper | length }}{% endfor %}", {})
    template._budget = lambda: timed(lambda: now)  # type: ignore[assignment,misc]

    def slow(_: int) -> str:
        nonlocal now
        now += 0.01
        return ""

    with pytest.raises(BadTemplate, match=r"more than 0\.25 s"):
        template.render(SAID, slow=slow, s="x" * 256 * 100)
    assert now == pytest.approx(0.26, abs=0.021)


def test_a_thousand_messages_with_tools_take_less_than_a_fifth_of_the_budget() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == messages | length - 1 %}!{% endif %}"
        "{{ '<|' + m.role + '|>' ~ m.content | trim }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"a": 1, "b": [1, 2, 3]}'}}
    message = {"role": "assistant", "content": "word " * 1000, "tool_calls": [call] * 4}
    made = ChatEnvironment()
    template = made.from_string(source)
    messages = MessageFormat().messages([message] * 1000)
    made.budget = RenderingBudget(steps=STEPS_MAX // 5, seconds=600)
    template.render(messages=messages)
    made.budget = RenderingBudget(steps=STEPS_MAX // 50, seconds=600)
    with pytest.raises(OverBudget):
        template.render(messages=messages)


@pytest.mark.parametrize(
    "source", ["{{ 'a' * 99 }}", "{{ ('ab' * 3)[1:4] ~ [1, 2][::-1] }}", "{{ '%s-%03d' % ('a', 7) }}"]
)
def test_counting_changes_no_result(source: str) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    assert (
        ChatTemplate(source, {}).render(SAID) == ImmutableSandboxedEnvironment().from_string(source).render()
    )


def test_a_template_of_any_length_is_not_compiled() -> None:
    with pytest.raises(BadTemplate, match="262,144 characters"):
        ChatTemplate("x" * (SOURCE_CHARS_MAX + 1), {})
