"""Details of an answer besides its text: echo, token ids, running usage, and logprobs of all of it."""

import itertools
import json
from typing import Any

import openai
import pytest
from frontend_kit import TOKENS, Kit, failing, first_goes_to, frontend, text_of
from scripted_worker import Act, ScriptedWorker, undisturbed
from simulated_frontend import simulated

from controller.frontend.openai.completion import ECHOED_LOGPROBS_MAX
from events.refusal import unsupported
from workers.engines.simulated.language import EOS
from workers.engines.simulated.sequence import PROMPT_LOGPROBS_MAX

PROMPT = [300, 301, 302, 1500]
TEXT = TOKENS.decode(PROMPT)
USUAL: dict[str, Any] = {"model": "m", "temperature": 0, "ignore_eos": True, "max_tokens": 6}


async def whole(kit: Kit, path: str = "/v1/completions", **ask: Any) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    status, body, _ = await kit.post(path, **USUAL | ask)
    assert status == 200, body
    return dict(body)


async def refused(kit: Kit, path: str = "/v1/completions", **ask: Any) -> tuple[str, str, str]:
    """Return the code, field and message of a refusal."""
    status, body, _ = await kit.post(path, **USUAL | ask)
    assert status == 400, body
    return body["error"]["code"], body["error"]["param"], body["error"]["message"]


def choices_of(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """Return one answer's choices from a stream's events."""
    return [choice for event in events for choice in event.get("choices", ()) if choice["index"] == index]


# --- an echo


async def test_an_echo_is_the_prompt_followed_by_the_answer() -> None:
    async with simulated() as kit:
        answer = (await whole(kit, prompt=PROMPT))["choices"][0]["text"]
        echoed = await whole(kit, prompt=PROMPT, echo=True)
        assert echoed["choices"][0] == {
            "index": 0,
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
            "text": TEXT + answer,
        }
        assert echoed["usage"]["prompt_tokens"] == 4 and echoed["usage"]["completion_tokens"] == 6
        said = (await whole(kit, prompt="once  upon", echo=True))["choices"][0]["text"]
        assert said.startswith("once  upon") and len(said) > len("once  upon")  # exactly, including spaces


async def test_an_echo_is_sent_in_one_event_with_the_first_token() -> None:
    async with simulated() as kit:
        answer = (await whole(kit, prompt=PROMPT))["choices"][0]["text"]
        events = await kit.stream(**USUAL, prompt=PROMPT, echo=True)
        assert text_of(events) == TEXT + answer
        first = choices_of(events)[0]["text"]
        assert first.startswith(TEXT) and len(first) > len(TEXT)
        assert len(choices_of(events)) == 6 and events[-1] == {"done": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_every_prompt_and_choice(stream: bool) -> None:
    async with simulated() as kit:
        ask = USUAL | {"prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 2}
        if stream:
            events = await kit.stream(**ask)
            texts = [text_of(events, index) for index in range(4)]
        else:
            texts = [choice["text"] for choice in (await whole(kit, **ask))["choices"]]
        assert [text[0] for text in texts] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_only_the_prompt_is_returned_if_nothing_else_is_wanted(
    stream: bool, logprobs: int | None
) -> None:
    async with simulated() as kit:
        ask = USUAL | {"prompt": PROMPT, "echo": True, "max_tokens": 0, "return_token_ids": True}
        ask |= {} if logprobs is None else {"logprobs": logprobs}
        if stream:
            events = await kit.stream(**ask, stream_options={"include_usage": True})
            usage = events[-2]["usage"]
            said = choices_of(events)
            text, ends, shown = text_of(events), said[-1]["finish_reason"], said[0]["logprobs"]
            assert [choice["token_ids"] for choice in said] == [[]] * len(said)
        else:
            body = await whole(kit, **ask)
            choice, usage = body["choices"][0], body["usage"]
            text, ends, shown = choice["text"], choice["finish_reason"], choice["logprobs"]
            assert choice["token_ids"] == []
        assert (text, ends) == (TEXT, "length")
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 0, 4)
        assert (shown is None) == (logprobs is None)
        if shown is not None:
            assert [len(shown[name]) for name in ("tokens", "token_logprobs", "top_logprobs")] == [4, 4, 4]


async def test_an_answer_without_generation_ends_well_although_its_first_token_ends_it() -> None:
    async with simulated() as kit:
        ask: dict[str, Any] = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1}
        body = await whole(kit, **ask, ignore_eos=False, logit_bias={str(EOS): 100})
        assert body["choices"][0]["text"] == TEXT
        assert body["choices"][0]["finish_reason"] == "length"


async def test_logprobs_of_an_echo_include_the_prompt() -> None:
    async with simulated() as kit:
        said = (await whole(kit, prompt=PROMPT, logprobs=2, return_token_ids=True))["choices"][0]
        prompt = PROMPT + said["token_ids"]
        body = await whole(kit, prompt=prompt, echo=True, logprobs=2, max_tokens=3)
        shown = body["choices"][0]["logprobs"]
        assert "".join(shown["tokens"]) == body["choices"][0]["text"]
        assert len(shown["tokens"]) == len(prompt) + 3
        assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
        assert None not in shown["token_logprobs"][1:]
        # the same as for an answer
        assert shown["token_logprobs"][4:10] == said["logprobs"]["token_logprobs"]
        assert shown["top_logprobs"][4:10] == said["logprobs"]["top_logprobs"]
        at = [body["choices"][0]["text"][offset:] for offset in shown["text_offset"]]
        assert all(rest.startswith(token) for rest, token in zip(at, shown["tokens"], strict=True))


async def test_too_many_logprobs_are_refused_with_a_message() -> None:
    async with simulated() as kit:
        most = ECHOED_LOGPROBS_MAX // 21
        code, param, message = await refused(kit, prompt=[300] * (most + 1), echo=True, logprobs=20)
        assert (code, param) == ("invalid_value", "logprobs") and str(ECHOED_LOGPROBS_MAX) in message
        code, _, message = await refused(kit, prompt=[300] * (PROMPT_LOGPROBS_MAX + 1), echo=True, logprobs=1)
        assert code == "invalid_request" and str(PROMPT_LOGPROBS_MAX) in message
        assert kit.facts == []


async def test_a_server_without_prompt_logprobs_is_reported() -> None:
    why = unsupported("prompt_logprobs", "this model's server gives no logprobs of a prompt")
    async with frontend(ScriptedWorker(always=Act(after=0, how="error", error=why.error))) as kit:
        said = await refused(kit, prompt=PROMPT, echo=True, logprobs=1)
        assert said == ("unsupported_parameter", "prompt_logprobs", why.message)


# --- prompt_logprobs


async def test_prompt_logprobs_are_those_of_an_answer_in_vllms_format() -> None:
    async with simulated() as kit:
        said = (await whole(kit, prompt=PROMPT, logprobs=2, return_token_ids=True))["choices"][0]
        prompt = PROMPT + said["token_ids"]
        body = await whole(kit, prompt=prompt, prompt_logprobs=2, max_tokens=3, n=2)
        found = body["choices"][0]["prompt_logprobs"]
        assert found == body["choices"][1]["prompt_logprobs"]
        assert body["choices"][0]["logprobs"] is None, "those of the answer were not requested"
        assert len(found) == len(prompt) and found[0] is None
        for place, token in enumerate(said["token_ids"]):
            ranked = found[len(PROMPT) + place]
            assert len(ranked) == 2 and ranked[str(token)]["rank"] == 1
            assert ranked[str(token)]["decoded_token"] == said["logprobs"]["tokens"][place]
            assert ranked[str(token)]["logprob"] == said["logprobs"]["token_logprobs"][place]
            assert sorted(one["rank"] for one in ranked.values()) == [1, 2]


async def test_an_unlikely_token_of_a_prompt_is_listed_before_the_most_likely_ones() -> None:
    async with simulated() as kit:
        found = (await whole(kit, prompt=[300, 301], prompt_logprobs=1))["choices"][0]["prompt_logprobs"]
        (own, one), (_, best) = found[1].items()
        assert (own, one["rank"], best["rank"]) == ("301", None, 1) and one["logprob"] < best["logprob"]


async def test_prompt_logprobs_of_a_chat_are_beside_its_choices() -> None:
    async with simulated() as kit:
        chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "n": 2}
        body = await whole(kit, "/v1/chat/completions", **chat)
        assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
        assert all("prompt_logprobs" not in choice for choice in body["choices"])
        plain = await whole(kit, "/v1/chat/completions", messages=chat["messages"])
        assert "prompt_logprobs" not in plain


async def test_prompt_logprobs_with_an_echo_and_its_own_number_of_logprobs() -> None:
    async with simulated() as kit:
        body = await whole(kit, prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=3, max_tokens=2)
        alone = await whole(kit, prompt=PROMPT, echo=True, logprobs=1, max_tokens=2)
        assert body["choices"][0]["logprobs"] == alone["choices"][0]["logprobs"]
        assert len(body["choices"][0]["prompt_logprobs"][2]) in (3, 4)


async def test_prompt_logprobs_are_refused_in_a_stream_and_beyond_their_bound() -> None:
    most = ECHOED_LOGPROBS_MAX // 21
    streamed: dict[str, Any] = {"prompt": PROMPT, "stream": True, "prompt_logprobs": 0}
    too_many: dict[str, Any] = {"prompt": [300] * (most + 1), "prompt_logprobs": 20}
    async with simulated() as kit:
        for ask in (streamed, too_many):
            code, param, _ = await refused(kit, **ask)
            assert (code, param) == ("invalid_value", "prompt_logprobs")


async def test_a_worker_that_continues_an_answer_is_not_asked_for_prompt_logprobs_again() -> None:
    workers = [failing("w1", "disconnect", after=3), ScriptedWorker("w2")]
    async with frontend() as kit:
        await first_goes_to(kit, *workers)
        await whole(kit, prompt=PROMPT, prompt_logprobs=1)
        assert [w.requests[-1].sampling.prompt_logprobs for w in workers] == [1, None]


async def test_a_worker_of_the_previous_release_returns_no_prompt_logprobs() -> None:
    async with frontend(ScriptedWorker()) as kit:  # it does not know the option
        body = await whole(kit, prompt=PROMPT, echo=True, logprobs=1, max_tokens=2)
        shown = body["choices"][0]["logprobs"]
        assert shown["token_logprobs"] == [None] * 4 + [-0.5] * 2


async def test_zero_tokens_are_refused_without_an_echo() -> None:
    async with simulated() as kit:
        assert (await refused(kit, prompt=PROMPT, max_tokens=0))[1] == "max_tokens"


# --- token ids


async def test_token_ids_of_prompt_and_answer_are_returned() -> None:
    async with simulated() as kit:
        choice = (await whole(kit, prompt="hello", return_token_ids=True))["choices"][0]
        assert choice["prompt_token_ids"] == TOKENS.encode("hello", special=True)
        assert TOKENS.decode(choice["token_ids"]) == choice["text"] and len(choice["token_ids"]) == 6
        messages = [{"role": "user", "content": "hi"}]
        body = await whole(kit, "/v1/chat/completions", messages=messages, return_token_ids=True)
        assert body["prompt_token_ids"] == TOKENS.encode("user: hi\nassistant:", special=False)
        choice = body["choices"][0]
        assert TOKENS.decode(choice["token_ids"]) == choice["message"]["content"]
        assert "prompt_token_ids" not in choice


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streamed_token_ids_arrive_with_their_tokens_and_the_prompts_with_the_first(path: str) -> None:
    async with simulated() as kit:
        chat = path.startswith("/v1/chat")
        asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": PROMPT}
        plain = await whole(kit, path, **asked, return_token_ids=True)
        events = await kit.stream(path, **USUAL, **asked, return_token_ids=True)
        said = choices_of(events)
        assert [token for choice in said for token in choice["token_ids"]] == plain["choices"][0]["token_ids"]
        places = events if chat else said
        assert [n for n, one in enumerate(places) if "prompt_token_ids" in one] == [0]
        prompt = plain if chat else plain["choices"][0]
        assert places[0]["prompt_token_ids"] == prompt["prompt_token_ids"]
        if chat:
            assert said[0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_token_is_among_the_ids_although_it_has_no_text(stream: bool) -> None:
    ids = undisturbed(PROMPT, 4)
    async with frontend(ScriptedWorker(always=Act(after=4, finish="stop"))) as kit:
        ask = USUAL | {"prompt": PROMPT, "stop_token_ids": [ids[-1]], "return_token_ids": True}
        if stream:
            events = await kit.stream(**ask)
            said, text = [t for choice in choices_of(events) for t in choice["token_ids"]], text_of(events)
        else:
            choice = (await whole(kit, **ask))["choices"][0]
            said, text = choice["token_ids"], choice["text"]
        assert (said, text) == (ids, TOKENS.decode(ids[:-1]))


async def test_a_token_without_text_is_a_separate_event() -> None:
    half = [TOKENS.encode("é", special=False)[0]]
    assert TOKENS.decode(half) == "\ufffd"
    worker = ScriptedWorker(follow=lambda tokens: half[0] if len(tokens) % 2 == 0 else 300)
    async with frontend(worker) as kit:
        events = await kit.stream(**USUAL, prompt=PROMPT, return_token_ids=True)
        assert [choice["token_ids"] for choice in choices_of(events)] == [[half[0]], [300]] * 3


async def test_a_text_engine_has_no_token_ids() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker(), engine="openai", exact=False)
        said = await refused(kit, prompt=PROMPT, return_token_ids=True)
        assert said[:2] == ("unsupported_parameter", "return_token_ids")


# --- usage with each event


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_is_sent_with_each_event(path: str) -> None:
    async with simulated() as kit:
        chat = path.startswith("/v1/chat")
        asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": PROMPT}
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await kit.stream(path, **USUAL, **asked, stream_options=options)
        read = events[0]["usage"]["prompt_tokens"]
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == [0] * chat + [1, 2, 3, 4, 5, 6, 6]
        assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {read}
        assert [event["usage"]["total_tokens"] - read for event in events[:-1]] == counts
        assert events[-2]["choices"] == []


# --- logprobs


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_0_returns_those_of_the_chosen_tokens(stream: bool) -> None:
    async with simulated() as kit:
        ask = USUAL | {"prompt": PROMPT, "temperature": 1.5, "seed": 4}
        parts = []
        for k in (0, 1, 3):
            if stream:
                events = await kit.stream(**ask, logprobs=k)
                parts.append([choice["logprobs"] for choice in choices_of(events)[:-1]])
            else:
                parts.append([(await whole(kit, **ask, logprobs=k))["choices"][0]["logprobs"]])
        for none, one, three in zip(*parts, strict=True):
            for place, token in enumerate(none["tokens"]):
                chosen = {token: none["token_logprobs"][place]}
                assert none["top_logprobs"][place] == chosen
                assert one["top_logprobs"][place] | chosen == one["top_logprobs"][place]
                assert len(one["top_logprobs"][place]) <= 2 and len(three["top_logprobs"][place]) in (3, 4)
            assert none["token_logprobs"] == one["token_logprobs"] == three["token_logprobs"]


async def test_logprobs_may_name_tokens_by_their_ids() -> None:
    async with simulated() as kit:
        ask: dict[str, Any] = {"prompt": PROMPT, "logprobs": 2, "return_token_ids": True}
        choice = (await whole(kit, **ask, return_tokens_as_token_ids=True))["choices"][0]
        ids = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == ids
        assert all(
            name in top and all(one.startswith("token_id:") for one in top)
            for name, top in zip(ids, choice["logprobs"]["top_logprobs"], strict=True)
        )
        plain = (await whole(kit, prompt=PROMPT, logprobs=2))["choices"][0]["logprobs"]
        assert choice["logprobs"]["text_offset"] == plain["text_offset"]
        messages = [{"role": "user", "content": "hi"}]
        chat = {"messages": messages, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
        body = await whole(kit, "/v1/chat/completions", **chat)
        for item in body["choices"][0]["logprobs"]["content"]:
            assert item["token"].startswith("token_id:") and item["top_logprobs"][0]["token"] == item["token"]


# --- combinations


WANTED: dict[str, dict[str, Any]] = {
    "echo": {"echo": True},
    "ids": {"return_token_ids": True},
    "logprobs": {"logprobs": 2},
    "stop": {"stop": ["e", "st"]},
    "two": {"n": 2, "temperature": 0.8, "seed": 3},
}


@pytest.mark.parametrize("names", [c for k in (1, 2, 3, 4, 5) for c in itertools.combinations(WANTED, k)])
async def test_a_stream_has_the_same_content_as_a_whole_answer(names: tuple[str, ...]) -> None:
    ask = USUAL | {"prompt": "some prompt", "max_tokens": 12}
    for name in names:
        ask |= WANTED[name]
    async with simulated() as kit:
        body = await whole(kit, **ask)
        events = await kit.stream(**ask, stream_options={"include_usage": True})
        assert events[-2]["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]
        for choice in body["choices"]:
            said = choices_of(events, choice["index"])
            assert "".join(one["text"] for one in said) == choice["text"]
            assert said[-1]["finish_reason"] == choice["finish_reason"]
            if "ids" in names:
                assert [t for one in said for t in one["token_ids"]] == choice["token_ids"]
                assert said[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            if "logprobs" in names:
                shown = [one["logprobs"] for one in said if one["logprobs"] is not None]
                for name, values in choice["logprobs"].items():
                    assert [value for one in shown for value in one[name]] == values, name


async def test_the_official_client_accepts_the_details() -> None:
    async with (
        simulated() as kit,
        openai.AsyncOpenAI(base_url=kit.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.completions.create(
            model="m", prompt="once", max_tokens=3, echo=True, logprobs=0, logit_bias={"300": -100}
        )
        assert answer.choices[0].text.startswith("once")
        shown = answer.choices[0].logprobs
        assert shown is not None and shown.tokens is not None and shown.token_logprobs is not None
        assert len(shown.tokens) == len(shown.token_logprobs) == 3 + len(TOKENS.encode("once", special=True))
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
            logit_bias={"300": 100},
            extra_body={"return_token_ids": True, "min_p": 0.5},
        )
        chunks = [chunk async for chunk in stream]
        more = [one.model_extra or {} for chunk in chunks for one in chunk.choices]
        ids = [token for extra in more for token in extra["token_ids"]]
        assert ids == [300] * 3
        assert json.loads(chunks[-1].to_json())["usage"]["completion_tokens"] == 3
