"""vLLM's small endpoints for any engine: /tokenize, /detokenize, /version, /ping and /v1/models."""

import io
import json
from collections import deque
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import pytest
from frontend_kit import TOKENS, Kit, frontend, sentencepiece_like
from scripted_worker import Act, ScriptedWorker
from tokenizers.processors import TemplateProcessing

from controller.frontend.openai.request_models import TEXT_CHARS_MAX, TOKENS_MAX
from events.decisions import HealthStatus
from events.observations import WorkerLeft
from events.token_bytes import BUILTIN_FILE

MESSAGES = [{"role": "user", "content": "hi"}]


async def ask(kit: Kit, path: str, **body: Any) -> dict[str, Any]:
    status, answer, _ = await kit.post(path, **body)
    assert status == 200, answer
    return dict(answer)


async def refused(kit: Kit, path: str, **body: Any) -> tuple[int, str, str | None]:
    status, answer, _ = await kit.post(path, **body)
    return status, answer["error"]["code"], answer["error"]["param"]


@pytest.mark.parametrize("engine", ["simulated", "transformers", "openai"])
async def test_a_text_is_tokenized_and_detokenized(engine: str) -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker(), engine=engine, context_tokens=777)
        text = "héllo  wörld 😀\n"
        found = await ask(kit, "/tokenize", model="m", prompt=text)
        ids = TOKENS.encode(text, special=True)
        assert found == {"count": len(ids), "max_model_len": 777, "tokens": ids, "token_strs": None}
        assert await ask(kit, "/detokenize", model="m", tokens=ids) == {"prompt": text}
        assert await ask(kit, "/tokenize", prompt=text) == found, "there is only one model"


async def test_a_conversation_is_tokenized_with_its_chat_template() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        found = await ask(kit, "/tokenize", model="m", messages=MESSAGES)
        await kit.post("/v1/chat/completions", model="m", messages=MESSAGES, max_tokens=1)
        assert found["tokens"] == worker.requests[0].tokens
        without = await ask(kit, "/tokenize", model="m", messages=MESSAGES, add_generation_prompt=False)
        assert TOKENS.decode(without["tokens"]) == "user: hi\n"
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert await ask(kit, "/tokenize", model="m", messages=parts) == found


async def test_token_strings_are_the_vocabularys_names() -> None:
    async with frontend(ScriptedWorker()) as kit:
        found = await ask(kit, "/tokenize", model="m", prompt="to be", return_token_strs=True)
        raw = json.loads(BUILTIN_FILE.read_text(encoding="utf-8"))
        names = {token: name for name, token in raw["model"]["vocab"].items()}
        assert found["token_strs"] == [names[token] for token in found["tokens"]]


async def test_special_tokens_are_added_and_shown_on_request(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens(["<s>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    async with frontend() as kit:
        await kit.add(ScriptedWorker(), tokenizer=str(tmp_path))
        with_it = await ask(kit, "/tokenize", prompt="hi")
        without = await ask(kit, "/tokenize", prompt="hi", add_special_tokens=False)
        assert with_it["tokens"] == [begin, *without["tokens"]]
        assert (await ask(kit, "/detokenize", tokens=with_it["tokens"]))["prompt"].startswith("<s>")
        assert await refused(kit, "/tokenize", messages=MESSAGES) == (400, "no_chat_template", "messages")


async def test_a_continued_message_is_tokenized_to_its_end() -> None:
    said = [*MESSAGES, {"role": "assistant", "content": "It is "}]
    async with frontend(ScriptedWorker()) as kit:
        found = await ask(
            kit, "/tokenize", messages=said, add_generation_prompt=False, continue_final_message=True
        )
        assert (await ask(kit, "/detokenize", tokens=found["tokens"]))["prompt"].endswith("assistant: It is ")


async def test_an_empty_text_has_no_tokens() -> None:
    async with frontend(ScriptedWorker()) as kit:
        found = await ask(kit, "/tokenize", prompt="")
        assert (found["count"], found["tokens"]) == (0, [])
        assert await ask(kit, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_long_texts_are_served_and_too_long_ones_refused_untokenized() -> None:
    async with frontend(ScriptedWorker()) as kit:

        async def large(path: str, **body: Any) -> tuple[int, Any]:
            raw = io.BytesIO(json.dumps(body).encode())
            async with kit.http.post(kit.url + path, data=raw) as answer:
                return answer.status, await answer.json()

        status, found = await large("/tokenize", prompt="word " * (TEXT_CHARS_MAX // 10))
        assert status == 200 and found["count"] == len(found["tokens"]) > 100_000
        ids = found["tokens"][:TOKENS_MAX]
        assert await large("/detokenize", tokens=ids) == (200, {"prompt": TOKENS.decode(ids)})
        for path, body in (
            ("/tokenize", {"prompt": "a" * (TEXT_CHARS_MAX + 1)}),
            ("/detokenize", {"tokens": [1] * (TOKENS_MAX + 1)}),
        ):
            status, said = await large(path, **body)
            assert (status, said["error"]["param"]) == (400, next(iter(body)))
            assert "at most" in said["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {}, (400, "invalid_value", "prompt")),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, (400, "invalid_value", "prompt")),
        ("/tokenize", {"prompt": [1, 2]}, (400, "invalid_value", "prompt")),
        ("/tokenize", {"messages": []}, (400, "invalid_value", "messages")),
        ("/tokenize", {"messages": [{"role": "user"}]}, (400, "invalid_value", "messages.0.content")),
        ("/tokenize", {"prompt": "a", "model": "none"}, (404, "model_not_found", "model")),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True},
            (400, "invalid_value", "continue_final_message"),
        ),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template": "x"},
            (400, "unsupported_parameter", "chat_template"),
        ),
        ("/detokenize", {}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": "x"}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": [-1]}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": [5, 2048]}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": [5], "model": "none"}, (404, "model_not_found", "model")),
    ],
)
async def test_bad_input_gets_one_clear_sentence(
    path: str, body: dict[str, Any], said: tuple[int, str, str]
) -> None:
    async with frontend(ScriptedWorker()) as kit:
        assert await refused(kit, path, **body) == said


async def test_unknown_fields_cause_a_warning() -> None:
    async with frontend(ScriptedWorker()) as kit:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [300]})):
            status, _, headers = await kit.post(path, **body, odd=1)
            assert (status, headers["Warning"]) == (200, '299 - "unknown fields, ignored: odd"')


async def test_a_model_must_be_named_if_there_are_several() -> None:
    async with frontend(ScriptedWorker(), ScriptedWorker("w2", model="other")) as kit:
        assert await refused(kit, "/tokenize", prompt="a") == (400, "invalid_value", "model")
        assert (await ask(kit, "/tokenize", prompt="a", model="other"))["count"] == 1


async def test_a_model_with_busy_or_failed_workers_is_tokenized_and_one_without_workers_is_not() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        kit.health(worker, HealthStatus.UNHEALTHY, 0.0)
        assert (await ask(kit, "/tokenize", prompt="a", model="m"))["count"] == 1
        kit.tell(WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=137))
        kit.health(worker, HealthStatus.DEAD, 0.0)
        assert (await refused(kit, "/tokenize", prompt="a", model="m"))[:2] == (503, "no_routable_worker")


async def test_a_tokenizer_that_cannot_be_loaded_is_reported() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker(), tokenizer="/nowhere")
        assert (await refused(kit, "/tokenize", prompt="a"))[:2] == (503, "tokenizer_missing")


async def test_tokenizing_is_served_on_the_api_port_but_not_on_the_admin_port() -> None:
    async with frontend(ScriptedWorker()) as kit:
        for path in ("/tokenize", "/detokenize", "/v1/models", "/v1/models/m"):
            async with kit.http.get(kit.admin + path) as answer:
                assert answer.status == 404
        for path in ("/version", "/ping", "/load", "/openapi.json"):
            async with kit.http.get(kit.admin + path) as answer:
                assert answer.status == 200


async def test_the_version_is_that_of_the_package() -> None:
    async with frontend(ScriptedWorker()) as kit, kit.http.get(kit.url + "/version") as answer:
        assert await answer.json() == {"version": version("holdfast")}


async def test_ping_returns_whether_a_request_could_be_served() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:

        async def pings() -> set[tuple[int, bytes]]:
            found = set()
            for method in ("GET", "POST", "HEAD"):
                async with kit.http.request(method, kit.url + "/ping") as answer:
                    found.add((answer.status, await answer.read()))
            return found

        assert await pings() == {(200, b"")}
        kit.health(worker, HealthStatus.UNHEALTHY, 0.0)
        assert await pings() == {(503, b"")}


async def test_the_load_is_the_number_of_requests_in_progress() -> None:
    async with frontend(ScriptedWorker(acts=deque([Act(after=1, how="silence")]))) as kit:

        async def load() -> Any:
            async with kit.http.get(kit.url + "/load") as answer:
                return await answer.json()

        assert await load() == {"server_load": 0}
        asked = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 9}
        async with kit.http.post(kit.url + "/v1/completions", json=asked) as running:
            await running.content.readline()
            assert await load() == {"server_load": 1}
            running.close()


async def test_models_report_the_length_of_their_context() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker(), context_tokens=5000)
        await kit.add(ScriptedWorker("w2"), context_tokens=4000)
        await kit.add(ScriptedWorker("w3", model="other"), context_tokens=3000)
        async with openai.AsyncOpenAI(base_url=kit.url + "/v1", api_key="none", max_retries=0) as client:
            listed = {model.id: getattr(model, "max_model_len", 0) async for model in client.models.list()}
            # the largest that two workers have: a single worker could claim any length
            assert listed == {"m": 4000, "other": 3000}
            one = await client.models.retrieve("other")
            assert (one.id, one.object, one.owned_by) == ("other", "model", "holdfast")
            assert one.model_extra == {"max_model_len": 3000, "root": "other", "parent": None}
