"""The console over HTTP: the page, its event stream, request history, post-mortems and actions."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, get_args

import aiohttp
import pytest
from console_kit import console
from fleet_history import EPOCH, History

from controller.console.endpoints import TOKEN, Verb
from controller.console.memory import EndedIncident

ECHO = (sys.executable, "-c", "import json, sys; print(json.dumps({'words': sys.argv[1:]}))")


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in answer.content:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


async def next_of(stream: AsyncIterator[tuple[str, Any]], name: str) -> Any:
    async with asyncio.timeout(20):
        async for one, body in stream:
            if one == name:
                return body
    raise AssertionError(f"no {name} event")


async def test_the_page_has_all_of_its_assets_and_a_policy_that_forbids_others() -> None:
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


async def test_other_paths_are_passed_to_the_other_handler() -> None:
    async with console(History().start()) as kit:
        for path in ("/", "/consoles", "/metrics"):
            async with kit.http.get(kit.url + path) as answer:
                assert await answer.text() == "the other handler"
        async with kit.http.get(kit.url + "/console/nothing") as answer:
            assert answer.status == 404 and "/console" in await answer.text()
        async with kit.http.get(kit.url + "/console/", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (308, "../console")
        async with kit.http.post(kit.url + "/console") as answer:
            assert answer.status == 405


async def test_events_are_streamed_to_a_viewer() -> None:
    history = History().start()
    async with console(history) as kit, kit.http.get(kit.url + "/console/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        stream = events(answer)
        hello = await next_of(stream, "hello")
        assert hello["frontend"] == "frontend-0" and hello["token"] == "" and hello["colors"]["DEAD"]
        first = await next_of(stream, "snapshot")
        assert set(first["sections"]["workers"]) == {"w0", "w1", "w2"}
        history.say(history.failed("w2", confirmed=True, reason="token_mismatch"))
        history.decide()
        kit.pass_on()
        changed = (await next_of(stream, "changes"))["sections"]
        assert set(changed["workers"]) == {"w2"} and changed["workers"]["w2"]["state"] == "UNHEALTHY"
        assert "incident" in changed["head"]["headline"]["text"]


async def test_the_time_before_the_frontend_started_is_loaded_for_the_first_viewer() -> None:
    history = History().start().corruption().recovery()
    ended = EndedIncident("incident-7", "worker:w5", "no_response", EPOCH, EPOCH, "dead")
    async with console(history, earlier=history.events, ended=[ended]) as kit:
        async with kit.http.get(kit.url + "/console/events") as answer:
            shown = (await next_of(events(answer), "snapshot"))["sections"]
        assert shown["incidents"]["incident-7"]["outcome"] == "dead" and len(shown["incidents"]) == 2
        assert any("token_mismatch" in row["text"] for row in shown["events"].values())


async def test_a_request_id_is_passed_to_the_command_as_an_id_only() -> None:
    async with console(History().start(), command=ECHO) as kit:
        for id in ("r1", "--help", "a b; rm -rf /", "<b>é</b>"):
            async with kit.http.get(kit.url + "/console/request", params={"id": id}) as answer:
                assert (await answer.json())["words"] == ["request", "-o", "json", "--", id]


async def test_an_internal_error_of_the_console_does_not_reach_the_router() -> None:
    async with console(History().start()) as kit:
        kit.console.absorb(object(), kit.history.events)  # type: ignore[arg-type]
        async with kit.http.get(kit.url + "/console") as answer:
            assert answer.status == 200


async def test_the_history_of_a_running_request_includes_its_present_worker() -> None:
    async with console(History().start(), command=ECHO) as kit:
        kit.running = {"r1": ["is answered now, by w1: 7 tokens so far"]}
        for id, lines in (("r1", kit.running["r1"]), ("r2", [])):
            async with kit.http.get(kit.url + "/console/request", params={"id": id}) as answer:
                assert (await answer.json())["now"] == lines


@pytest.mark.parametrize("id", ["", "  ", "x" * 201, "a\nb", "a\0b"])
async def test_an_invalid_request_id_is_rejected_in_one_sentence(id: str) -> None:
    async with (
        console(History().start(), command=ECHO) as kit,
        kit.http.get(kit.url + "/console/request", params={"id": id}) as answer,
    ):
        assert answer.status == 404 and "printable" in (await answer.json())["error"]


async def test_a_post_mortem_is_sandboxed_without_an_origin() -> None:
    write = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write(' '.join(sys.argv[1:4]))"
    async with console(History().start(), command=(sys.executable, "-c", write)) as kit:
        async with kit.http.get(kit.url + "/console/report", params={"incident": "incident-1"}) as answer:
            assert await answer.text() == "replay report --incident=incident-1"
            assert answer.headers["Content-Security-Policy"].startswith("sandbox allow-scripts")
            assert "allow-same-origin" not in answer.headers["Content-Security-Policy"]
        for query in ({}, {"incident": "a", "since": "b"}):
            async with kit.http.get(kit.url + "/console/report", params=query) as answer:
                assert answer.status == 400 and "?incident=ID" in await answer.text()


async def test_the_error_of_a_command_is_shown() -> None:
    complain = "import sys; print('holdfast: the journal holds no incident x', file=sys.stderr); sys.exit(1)"
    async with (
        console(History().start(), command=(sys.executable, "-c", complain)) as kit,
        kit.http.get(kit.url + "/console/report", params={"incident": "x"}) as answer,
    ):
        assert answer.status == 404
        assert await answer.text() == "No such post-mortem: the journal holds no incident x\n"


async def test_pages_of_other_origins_get_no_data() -> None:
    async with console(History().start()) as kit:
        for path in ("/console", "/console/events", "/console/report?since=1m", "/console/request?id=r"):
            for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
                async with kit.http.get(kit.url + path, headers=headers) as answer:
                    assert answer.status == 403 and "refuses this request" in await answer.text()


async def token_of(kit: Any) -> str:
    async with kit.http.get(kit.url + "/console/events") as answer:
        return str((await next_of(events(answer), "hello"))["token"])


async def act(kit: Any, body: Any, **headers: str) -> tuple[int, dict[str, str]]:
    usual = {"Origin": kit.url, TOKEN: await token_of(kit)}
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with kit.http.post(kit.url + "/console/act", data=data, headers=usual | headers) as answer:
        return answer.status, await answer.json()


async def test_actions_are_disabled_by_default_and_the_error_names_the_flag() -> None:
    async with console(History().start()) as kit:
        status, answer = await act(kit, {"verb": "drain", "worker": "w1"})
        assert status == 403 and "--console-actions" in answer["error"]
        assert await token_of(kit) == ""


@pytest.mark.parametrize("verb", get_args(Verb))
async def test_an_enabled_action_is_carried_out_as_by_a_command(verb: str) -> None:
    async with console(History().start(), acts=True) as kit:
        assert await act(kit, {"verb": verb, "worker": "w1"}) == (200, {"says": f"w1: {verb}"})
        ((done, body),) = kit.done
        assert done == verb and body["worker"] == "w1"
        assert body["by"] == "console of frontend-0, 127.0.0.1"
        assert set(body) == {"worker", "by"} | {"drain": {"deadline_s"}, "move": {"to"}}.get(verb, set())


async def test_the_reason_of_the_controllers_refusal_is_returned() -> None:
    async with console(History().start(), acts=True) as kit:
        assert await act(kit, {"verb": "drain", "worker": "w9"}) == (409, {"error": "there is no worker w9"})


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", {"verb": "chaos", "worker": "w1"}, {"verb": "drain"}, {"verb": "drain", "worker": ""},
             {"verb": "drain", "worker": "w1", "deadline_s": -1}, {"verb": "drain", "worker": "w1", "by": "me"}, b"x" * 5000]
)  # fmt: skip
async def test_an_invalid_action_is_rejected(body: Any) -> None:
    async with console(History().start(), acts=True) as kit:
        status, answer = await act(kit, body)
        assert status == 400 and answer["error"] and kit.done == []


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {TOKEN: "x"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}]
)  # fmt: skip
async def test_a_page_of_another_origin_cannot_act(headers: dict[str, str]) -> None:
    async with console(History().start(), acts=True) as kit:
        status, answer = await act(kit, {"verb": "drain", "worker": "w1"}, **headers)
        assert status == 403 and "not carried out" in answer["error"] and kit.done == []
