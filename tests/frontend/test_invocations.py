"""/invocations handles every kind of request by the fields of its body."""

import json
from typing import Any

import pytest
from frontend_kit import frontend
from scripted_worker import ScriptedWorker
from test_proxied import UPSTREAM, VECTOR, ServingWorker

PATH = "/invocations"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("body", "kind"), [(CHAT, "chat.completion"), ({"prompt": "hi", "max_tokens": 3}, "text_completion")]
)
async def test_an_answer_is_that_of_the_usual_path(body: dict[str, Any], kind: str) -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, answer, headers = await kit.post(PATH, **body)
        assert (status, answer["object"], answer["usage"]["completion_tokens"]) == (200, kind, 3)
        assert headers["X-Holdfast-Worker"] == "w1"
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        usual = (await kit.post(path, model="m", **body))[1]
        assert usual["choices"] == answer["choices"]


async def test_a_stream_is_that_of_the_usual_path() -> None:
    async with frontend(ScriptedWorker()) as kit:
        async with kit.http.post(kit.url + PATH, json=CHAT | {"stream": True}) as answer:
            said = (await answer.read()).decode()
        assert said.endswith("data: [DONE]\n\n") and said.count("chat.completion.chunk") >= 3


async def test_a_text_for_a_server_of_vectors_becomes_a_vector() -> None:
    async with frontend() as kit:
        worker = ServingWorker("w1")
        await kit.add(worker, **UPSTREAM | {"paths": ("/v1/embeddings",)})
        for body in ({"input": "x"}, {"messages": CHAT["messages"]}):
            assert (await kit.post(PATH, **body))[:2] == (200, VECTOR)
        assert {request.path for request in worker.passed_on} == {"/v1/embeddings"}


@pytest.mark.parametrize(
    ("body", "words"),
    [({"odd": 1}, "none of the fields that m takes"), ({"input": "x"}, "none of the fields"), ([], "object")],
)
async def test_a_body_that_no_path_takes_is_refused(body: Any, words: str) -> None:
    async with (
        frontend(ScriptedWorker()) as kit,
        kit.http.post(kit.url + PATH, data=json.dumps(body)) as answer,
    ):
        assert answer.status == 400
        assert words in (await answer.json())["error"]["message"]


async def test_a_form_is_refused_for_a_body_of_json() -> None:
    async with frontend(ScriptedWorker()) as kit:
        for media in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            headers, url = {"Content-Type": media}, f"{kit.url}/v1/chat/completions"
            async with kit.http.post(url, data=json.dumps(CHAT), headers=headers) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["param"]) == (400, "Content-Type")
