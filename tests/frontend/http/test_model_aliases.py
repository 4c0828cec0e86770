"""Model aliases: additional names of a model."""

from typing import Any

from frontend_kit import frontend
from scripted_worker import ScriptedWorker

from controller.config.flags import gather
from controller.frontend.settings import FrontendSettings
from events.decisions import HealthStatus

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
ALIASES = {"gpt-4o": "m", "gone": "none", "m2": "m"}


async def test_an_alias_is_served_listed_and_named_in_the_answer() -> None:
    async with frontend(ScriptedWorker(), model_aliases=ALIASES) as kit:
        for name in ("m", "gpt-4o", "m2"):
            status, answer, _ = await kit.post("/v1/chat/completions", model=name, **CHAT)
            assert (status, answer["model"]) == (200, name)
            events = await kit.stream("/v1/chat/completions", model=name, **CHAT)
            assert {event["model"] for event in events if "model" in event} == {name}
            status, _, _ = await kit.post("/tokenize", model=name, prompt="a")
            assert status == 200
        async with kit.http.get(kit.url + "/v1/models") as answer:
            listed = {one["id"]: one.get("root") for one in (await answer.json())["data"]}
        assert listed == {"m": "m", "gpt-4o": "m", "m2": "m"}
        async with kit.http.get(kit.url + "/v1/models/gpt-4o") as answer:
            assert (await answer.json())["root"] == "m"
        requests = kit.counted("dynamo_frontend_requests_total", "model")
        assert set(requests) <= {("m",)}, "metrics use only the model's own name"


async def test_an_alias_of_a_model_without_workers_is_not_found() -> None:
    async with frontend(ScriptedWorker(), model_aliases=ALIASES) as kit:
        for name in ("gone", "unknown"):
            status, answer, _ = await kit.post("/v1/chat/completions", model=name, **CHAT)
            assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_workers_own_model_name_has_precedence_over_an_alias() -> None:
    async with frontend(ScriptedWorker(), model_aliases={"m": "other"}) as kit:
        status, answer, _ = await kit.post("/v1/chat/completions", model="m", **CHAT)
        assert (status, answer["model"]) == (200, "m")


async def test_additional_names_of_servers_are_served_and_outlive_their_worker() -> None:
    async with frontend(ScriptedWorker()) as kit:
        await kit.add(ScriptedWorker(name="w2", model="n"), also_served=("n2", "m"))
        for name, expected in (("n", 200), ("n2", 200), ("m", 200), ("n3", 404)):
            status, answer, _ = await kit.post("/v1/chat/completions", model=name, **CHAT)
            assert status == expected
            assert expected == 404 or answer["model"] == name
        async with kit.http.get(kit.url + "/v1/models") as answer:
            listed = {one["id"]: one.get("root") for one in (await answer.json())["data"]}
        assert listed == {"m": "m", "n": "n", "n2": "n"}, (
            "a model's own name is not an additional name of another one"
        )
        kit.health(kit.workers[-1], HealthStatus.DEAD, 0.0)
        status, answer, _ = await kit.post("/v1/chat/completions", model="n2", **CHAT)
        assert (status, answer["error"]["code"]) == (503, "no_routable_worker")


def test_flags_and_variables_set_aliases_in_one_line() -> None:
    told = {"HOLDFAST_FRONTEND__MODEL_ALIASES": "gpt-4o=llama-70b, a/b:1=c"}
    settings = gather(FrontendSettings, "frontend", {}, told)
    assert settings.model_aliases == {"gpt-4o": "llama-70b", "a/b:1": "c"}
