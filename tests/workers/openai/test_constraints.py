"""Constraints on answers reach an upstream under a field name that it obeys, or are refused.

The same holds for logprobs of prompts, which only some upstreams support.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_contract import Rig, prompt
from upstream import Upstream

from events.refusal import read_refusal
from events.wire import Generate, Sampling
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.exchange import (
    PROBES,
    WORD,
    Constraints,
    read_prompt_logprobs,
)
from workers.engines.openai.field_probes import REPEAT_S_MAX, REPEAT_S_MIN
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.stream_decoder import Fault

CHOICE = ["yes", "no"]
SCHEMA = {"type": "object"}
GRAMMAR = 'root ::= "ab" | "cd"\n'
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = await Upstream().start()
    yield server
    await server.stop()


@pytest.fixture
async def rig(upstream: Upstream) -> AsyncIterator[Rig]:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url)))
    await rig.start()
    yield rig
    await rig.engine.stop()


async def ask(rig: Rig, guided: dict[str, Any], fallback: dict[str, Any] | None = None) -> Any:
    """Return the end of an answer with this constraint."""
    key, sampling = rig.key(), Sampling(max_tokens=3)
    request = Generate(key, f"r{key}", prompt(), 40, sampling, guided=guided, guided_fallback=fallback)
    rig.engine.submit(key, request)
    return await rig.answer(key)


@pytest.mark.parametrize(
    ("obeys", "given", "said"),
    [
        # current vLLM
        ("structured_outputs", {"guided_choice": CHOICE}, {"structured_outputs": {"choice": CHOICE}}),
        ("structured_outputs", {"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ("structured_outputs", {"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        (
            "structured_outputs",
            {"structured_outputs": {"choice": CHOICE, "regex": None}},
            {"structured_outputs": {"choice": CHOICE}},
        ),
        ("structured_outputs", {"response_format": FORMAT}, {"structured_outputs": {"json": SCHEMA}}),
        (
            "structured_outputs",
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ),
        ("structured_outputs response_format", {"response_format": FORMAT}, {"response_format": FORMAT}),
        # earlier vLLM
        ("guided", {"guided_choice": CHOICE}, {"guided_choice": CHOICE}),
        ("guided", {"structured_outputs": {"grammar": "g"}}, {"guided_grammar": "g"}),
        ("guided", {"response_format": FORMAT}, {"guided_json": SCHEMA}),
        # other servers
        ("response_format", {"response_format": FORMAT}, {"response_format": FORMAT}),
    ],
)
async def test_a_constraint_is_sent_under_a_name_that_the_server_obeys(
    upstream: Upstream, rig: Rig, obeys: str, given: dict[str, Any], said: dict[str, Any]
) -> None:
    upstream.obeys = frozenset(obeys.split())
    answer = await ask(rig, given)
    assert answer.finish == "length"
    names = {"structured_outputs", "response_format", "guided_choice", "guided_regex", "guided_json"}
    names |= {"guided_grammar"}
    assert {name: value for name, value in upstream.bodies[-1].items() if name in names} == said


@pytest.mark.parametrize(
    ("obeys", "said"),
    [
        ("structured_outputs ebnf gbnf guided", {"structured_outputs": {"grammar": GRAMMAR}}),
        # vLLM with a backend that supports other constraints, but no grammars
        ("structured_outputs, no grammars", {"structured_outputs": {"json": SCHEMA}}),
        ("ebnf guided", {"ebnf": GRAMMAR}),
        ("gbnf response_format", {"grammar": 'root ::= "ab" | "cd"\n'}),
        ("guided response_format", {"guided_grammar": GRAMMAR}),
        ("response_format", {"response_format": FORMAT}),
    ],
)
async def test_a_grammar_is_sent_in_the_servers_own_notation_or_the_clients_own_field_instead(
    upstream: Upstream, rig: Rig, obeys: str, said: dict[str, Any]
) -> None:
    upstream.obeys = frozenset(obeys.split(", ") if "," in obeys else obeys.split())
    answer = await ask(rig, {"structured_outputs": {"grammar": GRAMMAR}}, {"response_format": FORMAT})
    assert answer.finish == "length"
    names = {"structured_outputs", "response_format", "guided_grammar", "ebnf", "grammar"}
    assert {name: value for name, value in upstream.bodies[-1].items() if name in names} == said


async def test_an_answer_does_not_continue_on_a_server_that_takes_no_grammar(
    upstream: Upstream, rig: Rig
) -> None:
    upstream.obeys = frozenset(("response_format",))
    error = (await ask(rig, {"structured_outputs": {"grammar": GRAMMAR}})).error
    assert "does not constrain" in str(error)


@pytest.mark.parametrize("manner", ["vllm", "llamacpp", "strict"])
@pytest.mark.parametrize(
    ("obeys", "given"),
    [
        ("", {"guided_choice": CHOICE}),
        ("", {"structured_outputs": {"regex": "a"}}),
        ("", {"response_format": FORMAT}),
        ("response_format", {"guided_choice": CHOICE}),
        ("guided", {"structured_outputs": {"structural_tag": "x"}}),
        ("guided", {"response_format": {"type": "json_object"}}),
    ],
)
async def test_a_constraint_that_is_not_obeyed_is_refused_by_name_and_not_ignored(
    upstream: Upstream, rig: Rig, manner: Any, obeys: str, given: dict[str, Any]
) -> None:
    upstream.obeys, upstream.manner = frozenset(obeys.split()), manner
    before = len(upstream.bodies)
    error = (await ask(rig, given)).error
    reason, _, detail = str(error).partition(":")
    found = read_refusal(detail)
    assert (reason, found.status) == ("invalid_request", 400)
    assert (found.code, found.param) == ("unsupported_parameter", next(iter(given)))
    assert "does not constrain" in found.message
    assert len(upstream.bodies) == before  # no answer was begun


async def test_a_server_is_probed_once(upstream: Upstream, rig: Rig) -> None:
    upstream.obeys = frozenset(("guided",))
    for _ in range(3):
        assert (await ask(rig, {"guided_choice": CHOICE})).finish == "length"
    assert upstream.probes.count(PROBES["structured_outputs"]) == 1
    assert upstream.probes.count(PROBES["guided"]) == 1
    assert (await ask(rig, {"structured_outputs": {"choice": [WORD]}})).finish == "length"
    assert len(upstream.probes) == 3  # and one contradiction, which it accepted


@pytest.mark.parametrize(
    ("reads", "sent"),
    [
        ("structured_outputs", {"structured_outputs": {"json": SCHEMA}}),
        ("guided", {"guided_json": SCHEMA}),
        ("response_format", {"response_format": FORMAT}),
    ],
)
async def test_a_validated_name_is_used_behind_a_reasoning_parser(
    upstream: Upstream, rig: Rig, reads: str, sent: dict[str, Any]
) -> None:
    """A server that constrains only what follows its reasoning does not answer a probe with the word.

    It rejects a contradiction, however, so clients may use `response_format` there.
    """
    upstream.reads = frozenset((reads,))
    assert (await ask(rig, {"response_format": FORMAT})).finish == "length"
    assert sent.items() <= upstream.bodies[-1].items()


async def test_a_failed_probe_is_repeated_later_each_time_after_twice_as_long(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that obeyed no constraint at the first probe, and does now, gets constrained requests without a new worker."""
    loop, ahead = asyncio.get_running_loop(), 0.0
    told = loop.time
    asked: list[dict[str, Any]] = []
    obeys = False

    async def complete(more: dict[str, Any]) -> str | None:
        asked.append(more)
        return WORD if obeys else "other"

    constraints = Constraints(complete)
    monkeypatch.setattr(loop, "time", lambda: told() + ahead)
    for wait_s in (REPEAT_S_MIN, 2 * REPEAT_S_MIN, 4 * REPEAT_S_MIN):
        with pytest.raises(Fault):
            await constraints.translate({"structured_outputs": {"regex": "a"}})
        before = len(asked)
        ahead += wait_s - 1
        with pytest.raises(Fault):
            await constraints.translate({"structured_outputs": {"regex": "a"}})
        assert len(asked) == before
        ahead += 2
    obeys = True
    given = {"structured_outputs": {"regex": "a"}}
    assert await constraints.translate(given) == given
    before, obeys = len(asked), False
    ahead += REPEAT_S_MAX - 60
    assert await constraints.translate(given) == given and len(asked) == before
    ahead += 120
    with pytest.raises(Fault):  # a successful probe expires as well
        await constraints.translate(given)


@pytest.mark.parametrize("fault", ["http_401", "http_403", "http_404", "cut"])
async def test_probes_are_forgotten_when_the_server_may_be_another_one(
    upstream: Upstream, rig: Rig, fault: str
) -> None:
    """After a restart without an ability, constraints are refused by name instead of being sent and ignored."""
    upstream.obeys = frozenset(("structured_outputs",))
    assert (await ask(rig, {"guided_choice": CHOICE})).finish == "length"
    upstream.fault, upstream.obeys = fault, frozenset()
    assert (await rig.ask(prompt())).error
    upstream.fault = ""
    error = str((await ask(rig, {"guided_choice": CHOICE})).error)
    assert error.startswith("invalid_request:") and "does not constrain" in error


async def test_a_probe_that_fails_is_an_error_and_is_repeated(upstream: Upstream, rig: Rig) -> None:
    upstream.obeys, upstream.broken_probes = frozenset(("structured_outputs",)), 1
    assert str((await ask(rig, {"guided_choice": CHOICE})).error).startswith("engine_error: ")
    assert (await ask(rig, {"guided_choice": CHOICE})).finish == "length"


# --- logprobs of a prompt


async def test_a_server_without_prompt_logprobs_refuses_echo(upstream: Upstream, rig: Rig) -> None:
    upstream.manner = "llamacpp"
    answer = await rig.ask(prompt(), prompt_logprobs=1)
    found = read_refusal(str(answer.error).partition(":")[2])
    assert (found.code, found.param) == ("unsupported_parameter", "prompt_logprobs")


async def test_a_continuation_does_not_repeat_prompt_logprobs(rig: Rig) -> None:
    answer = await rig.ask(prompt(), prompt_logprobs=2, logprobs=1, max_tokens=4)
    assert [len(chunk.logprobs or ()) for chunk in answer.chunks] == [41, 1, 1, 1]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('{"choices": [{}]}', "gives no logprobs of a prompt"),
        ('{"choices": []}', "cannot be read"),
        ("{", "cannot be read"),
        ("\xff", "cannot be read"),
        ('{"choices": [{"prompt_logprobs": [null, {"a": 1}]}]}', "cannot be read"),
        ('{"choices": [{"prompt_logprobs": [null]}]}', "of 2 tokens"),
        ('{"choices": [{"prompt_logprobs": [null, null]}]}', "does not say how likely"),
        ('{"choices": [{"prompt_logprobs": [null, {"7": {"logprob": -1}}]}]}', "does not say how likely"),
        ('{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": null}}]}]}', "non_finite"),
    ],
)
def test_invalid_prompt_logprobs_are_a_server_error(said: str, words: str) -> None:
    with pytest.raises(Fault, match=words):
        read_prompt_logprobs(said.encode("latin-1"), [5, 6], 1)


# --- limits on tokens


@pytest.mark.parametrize(
    ("name", "value"), [("allowed_token_ids", [300, 301]), ("bad_words", ["300", "301 302"])]
)
async def test_limits_on_tokens_reach_an_upstream_that_obeys_them(
    rig: Rig, upstream: Upstream, name: str, value: list[Any]
) -> None:
    answer = await rig.ask(prompt(), max_tokens=3, **{name: value})
    assert answer.finish == "length" and upstream.bodies[-1][name] == value
    await rig.ask(prompt(), max_tokens=3)
    assert name not in upstream.bodies[-1]


@pytest.mark.parametrize(
    ("name", "value"), [("allowed_token_ids", [300, 301]), ("bad_words", ["300", "301 302"])]
)
async def test_limits_on_tokens_are_refused_by_name_if_an_upstream_ignores_them(
    rig: Rig, upstream: Upstream, name: str, value: list[Any]
) -> None:
    upstream.obeys = frozenset({"limits ignored"})
    answer = await rig.ask(prompt(), max_tokens=3, **{name: value})
    assert answer.error is not None
    refusal = read_refusal(answer.error.partition(":")[2])
    assert (refusal.code, refusal.param) == ("unsupported_parameter", name)
    assert not upstream.bodies, "the request itself was not sent"


@pytest.mark.parametrize("manner", ["llamacpp", "strict", "text"])
async def test_limits_on_tokens_need_an_upstream_with_token_ids(upstream: Upstream, manner: Any) -> None:
    upstream.manner = manner
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url)))
    await rig.start()
    answer = await rig.ask(prompt(), prompt_text="a", max_tokens=3, allowed_token_ids=[300])
    await rig.engine.stop()
    assert answer.error is not None and "allowed_token_ids" in answer.error
