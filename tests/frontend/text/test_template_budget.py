"""A chat template that would never end, or would take all memory, is stopped: it comes with a model's files, which a
compromised worker may name."""

import pytest

from controller.frontend.text.chat_templates import SOURCE_CHARS_MAX, BadTemplate, ChatTemplate
from controller.frontend.text.jinja_environment import (
    SECONDS_MAX,
    STEPS_MAX,
    OverBudget,
    RenderingBudget,
    environment,
)
from controller.frontend.text.message_format import MessageFormat

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
    "{% set b %}{% for i in range(9999) %}xxxxxxxxxxxxx{% endfor %}{% endset %}"
    + MANY
    + "{{ b }}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS + HUGE)
def test_a_template_is_stopped_before_it_takes_all_time_or_memory(source: str) -> None:
    with pytest.raises(BadTemplate, match=r"more than|digits|not allowed|recursion"):
        ChatTemplate(source, {}).render(SAID)


def test_a_template_can_be_rendered_again_after_it_was_stopped() -> None:
    template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}done", {})
    with pytest.raises(BadTemplate, match="1,000,000 steps"):
        template.render(SAID, n=9999)
    assert template.render(SAID, n=9) == "done"


def test_time_is_bounded_where_steps_take_long() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += SECONDS_MAX / 3
        return now

    budget = RenderingBudget(clock)
    with pytest.raises(OverBudget, match="more than 1 s"):
        for _ in range(STEPS_MAX // 2):
            budget.spend(1)


def test_a_thousand_messages_with_tools_take_less_than_a_fifth_of_the_budget() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == messages | length - 1 %}!{% endif %}"
        "{{ '<|' + m.role + '|>' ~ m.content | trim }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"a": 1, "b": [1, 2, 3]}'}}
    message = {"role": "assistant", "content": "word " * 1000, "tool_calls": [call] * 4}
    made = environment()
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
