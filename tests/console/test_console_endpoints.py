"""The console over HTTP: its page, what flows, what is looked up, and what may be done."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from console_kit import console
from made_history import EPOCH, History

from controller.console.actions import VERBS
from controller.console.guard import TOKEN
from controller.console.memory import EndedIncident

ECHO = (sys.executable, "-c", "import json, sys; print(json.dumps({'words': sys.argv[1:]}))")


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in answer.content:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


async def next_of(told: AsyncIterator[tuple[str, Any]], name: str) -> Any:
    async with asyncio.timeout(20):
        async for one, body in told:
            if one == name:
                return body
    raise AssertionError(f"no {name} came")


async def test_the_page_brings_all_that_it_needs_and_may_load_nothing_else() -> None:
    async with console(History().start()) as kit:
        async with kit.http.get(kit.url + "/console") as answer:
            page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert (
            "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        )
        assert "<script>" not in page and "style=" not in page and "http" not in page
        for name in ("console.js", "console.css"):
            assert f"console/{name}" in page
            async with kit.http.get(f"{kit.url}/console/{name}") as answer:
                assert answer.status == 200 and len(await answer.text()) > 1000
                assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_what_is_not_the_consoles_is_answered_by_another() -> None:
    async with console(History().start()) as kit:
        for path in ("/", "/consoles", "/metrics"):
            async with kit.http.get(kit.url + path) as answer:
                assert await answer.text() == "another answers"
        async with kit.http.get(kit.url + "/console/nothing") as answer:
            assert answer.status == 404 and "/console" in await answer.text()
        async with kit.http.get(kit.url + "/console/", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (308, "../console")
        async with kit.http.post(kit.url + "/console") as answer:
            assert answer.status == 405


async def test_what_happens_flows_to_who_looks() -> None:
    history = History().start()
    async with console(history) as kit, kit.http.get(kit.url + "/console/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        told = events(answer)
        hello = await next_of(told, "hello")
        assert hello["frontend"] == "frontend-0" and hello["token"] == "" and hello["colors"]["DEAD"]
        first = await next_of(told, "snapshot")
        assert set(first["sections"]["workers"]) == {"w0", "w1", "w2"}
        history.say(history.failed("w2", confirmed=True, reason="token_mismatch"))
        history.decide()
        kit.pass_on()
        changed = (await next_of(told, "changes"))["sections"]
        assert set(changed["workers"]) == {"w2"} and changed["workers"]["w2"]["state"] == "UNHEALTHY"
        assert "incident" in changed["head"]["headline"]["text"]


async def test_what_was_before_the_frontend_began_is_learnt_when_somebody_looks() -> None:
    history = History().start().corruption().recovery()
    ended = EndedIncident("incident-7", "worker:w5", "no_response", EPOCH, EPOCH, "dead")
    async with console(history, earlier=history.events, ended=[ended]) as kit:
        async with kit.http.get(kit.url + "/console/events") as answer:
            shown = (await next_of(events(answer), "snapshot"))["sections"]
        assert shown["incidents"]["incident-7"]["outcome"] == "dead" and len(shown["incidents"]) == 2
        assert any("token_mismatch" in row["text"] for row in shown["events"].values())


async def test_a_request_is_looked_up_by_a_command_that_takes_its_id_for_nothing_else() -> None:
    async with console(History().start(), command=ECHO) as kit:
        for id in ("r1", "--help", "a b; rm -rf /", "<b>é</b>"):
            async with kit.http.get(kit.url + "/console/request", params={"id": id}) as answer:
                assert (await answer.json())["words"] == ["request", "-o", "json", "--", id]


async def test_a_mistake_of_the_consoles_keeps_no_request_from_being_routed() -> None:
    async with console(History().start()) as kit:
        kit.console.absorb(object(), kit.history.events)  # type: ignore[arg-type]
        async with kit.http.get(kit.url + "/console") as answer:
            assert answer.status == 200


async def test_of_a_request_that_is_answered_now_that_is_said() -> None:
    async with console(History().start(), command=ECHO) as kit:
        kit.running = {"r1": ["is answered now, by w1: 7 tokens so far"]}
        for id, said in (("r1", kit.running["r1"]), ("r2", [])):
            async with kit.http.get(kit.url + "/console/request", params={"id": id}) as answer:
                assert (await answer.json())["now"] == said


@pytest.mark.parametrize("id", ["", "  ", "x" * 201, "a\nb", "a\0b"])
async def test_what_can_name_no_request_is_refused_in_a_sentence(id: str) -> None:
    async with (
        console(History().start(), command=ECHO) as kit,
        kit.http.get(kit.url + "/console/request", params={"id": id}) as answer,
    ):
        assert answer.status == 404 and "printable" in (await answer.json())["error"]


async def test_a_post_mortem_has_no_origin_that_could_ask_for_anything() -> None:
    write = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write(' '.join(sys.argv[1:4]))"
    async with console(History().start(), command=(sys.executable, "-c", write)) as kit:
        async with kit.http.get(kit.url + "/console/report", params={"incident": "incident-1"}) as answer:
            assert await answer.text() == "replay report --incident=incident-1"
            assert answer.headers["Content-Security-Policy"].startswith("sandbox allow-scripts")
            assert "allow-same-origin" not in answer.headers["Content-Security-Policy"]
        for asked in ({}, {"incident": "a", "since": "b"}):
            async with kit.http.get(kit.url + "/console/report", params=asked) as answer:
                assert answer.status == 400 and "?incident=ID" in await answer.text()


async def test_what_a_command_complains_of_is_what_is_said() -> None:
    complain = "import sys; print('holdfast: the journal holds no incident x', file=sys.stderr); sys.exit(1)"
    async with (
        console(History().start(), command=(sys.executable, "-c", complain)) as kit,
        kit.http.get(kit.url + "/console/report", params={"incident": "x"}) as answer,
    ):
        assert answer.status == 404
        assert await answer.text() == "There is no such post-mortem: the journal holds no incident x\n"


async def test_pages_of_others_get_nothing() -> None:
    async with console(History().start()) as kit:
        for path in ("/console", "/console/events", "/console/report?since=1m", "/console/request?id=r"):
            for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
                async with kit.http.get(kit.url + path, headers=headers) as answer:
                    assert answer.status == 403 and "does not answer" in await answer.text()


async def word(kit: Any) -> str:
    async with kit.http.get(kit.url + "/console/events") as answer:
        return str((await next_of(events(answer), "hello"))["token"])


async def act(kit: Any, body: Any, **headers: str) -> tuple[int, dict[str, str]]:
    usual = {"Origin": kit.url, TOKEN: await word(kit)}
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with kit.http.post(kit.url + "/console/act", data=data, headers=usual | headers) as answer:
        return answer.status, await answer.json()


async def test_it_does_nothing_unless_it_is_allowed_and_says_how_to() -> None:
    async with console(History().start()) as kit:
        status, said = await act(kit, {"verb": "drain", "worker": "w1"})
        assert status == 403 and "--console-actions" in said["error"]
        assert await word(kit) == ""


@pytest.mark.parametrize("verb", VERBS)
async def test_what_is_allowed_is_done_as_a_command_does_it(verb: str) -> None:
    async with console(History().start(), acts=True) as kit:
        assert await act(kit, {"verb": verb, "worker": "w1"}) == (200, {"says": f"w1: {verb}"})
        ((done, body),) = kit.done
        assert done == verb and body["worker"] == "w1"
        assert body["by"] == "console of frontend-0, 127.0.0.1"
        assert set(body) == {"worker", "by"} | {"drain": {"deadline_s"}, "move": {"to"}}.get(verb, set())


async def test_what_is_refused_is_said_in_the_controllers_words() -> None:
    async with console(History().start(), acts=True) as kit:
        assert await act(kit, {"verb": "drain", "worker": "w9"}) == (409, {"error": "there is no worker w9"})


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", {"verb": "chaos", "worker": "w1"}, {"verb": "drain"}, {"verb": "drain", "worker": ""},
             {"verb": "drain", "worker": "w1", "deadline_s": -1}, {"verb": "drain", "worker": "w1", "by": "me"}, b"x" * 5000]
)  # fmt: skip
async def test_what_is_unclear_is_not_done(body: Any) -> None:
    async with console(History().start(), acts=True) as kit:
        status, said = await act(kit, body)
        assert status == 400 and said["error"] and kit.done == []


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {TOKEN: "x"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}]
)  # fmt: skip
async def test_nobody_elses_page_can_have_anything_done(headers: dict[str, str]) -> None:
    async with console(History().start(), acts=True) as kit:
        status, said = await act(kit, {"verb": "drain", "worker": "w1"}, **headers)
        assert status == 403 and "not done" in said["error"] and kit.done == []
