"""`/busy_threshold` has Dynamo's format; new values apply on every frontend, through the journal."""

from typing import Any

import pytest
from frontend_kit import Kit, frontend
from scripted_worker import ScriptedWorker
from waits import until

from events.observations import BusyThresholdsSet

NONE = {
    "active_decode_blocks_threshold": None,
    "active_prefill_tokens_threshold": None,
    "active_prefill_tokens_threshold_frac": None,
}
USUAL = {**NONE, "active_decode_blocks_threshold": 0.85, "active_prefill_tokens_threshold": 10_000}


async def post(kit: Kit, **body: Any) -> tuple[int, Any]:
    async with kit.http.post(kit.admin + "/busy_threshold", json=body) as answer:
        return answer.status, await answer.json()


async def listed(kit: Kit) -> Any:
    async with kit.http.get(kit.admin + "/busy_threshold") as answer:
        assert answer.status == 200
        return (await answer.json())["thresholds"]


def fold(kit: Kit) -> None:
    """Let the journal return what this frontend has published."""
    kit.tell(*kit.said(BusyThresholdsSet))


async def test_thresholds_are_listed_set_merged_and_published() -> None:
    async with frontend(ScriptedWorker("w1"), admission_control="token-capacity") as kit:
        assert await listed(kit) == [{"model": "m", **USUAL}]
        assert await post(kit, model="m") == (200, {"model": "m", **USUAL}), "all null: the current values"
        expected = {"model": "m", **USUAL, "active_decode_blocks_threshold": 0.5}
        assert await post(kit, model="m", active_decode_blocks_threshold=0.5) == (200, expected)
        (said,) = kit.said(BusyThresholdsSet)
        assert said == BusyThresholdsSet(frontend="f1", model="m", active_decode_blocks=0.5)
        fold(kit)
        assert await listed(kit) == [expected]
        both = {**expected, "active_prefill_tokens_threshold": 7}
        assert await post(kit, model="m", active_prefill_tokens_threshold=7) == (200, both)
        fold(kit)
        assert await post(kit, model="m", **NONE) == (200, both)


async def test_a_new_threshold_applies_to_the_next_request() -> None:
    worker = ScriptedWorker("w1", kv_used=60)
    async with frontend(worker, admission_control="token-capacity") as kit:
        await until(lambda: (load := kit.plane.load("w1")) is not None and load.kv_used == 60)
        ask: dict[str, Any] = {"model": "m", "prompt": [300], "max_tokens": 2}
        assert (await kit.post("/v1/completions", **ask))[0] == 200
        await post(kit, model="m", active_decode_blocks_threshold=0.5)
        fold(kit)
        assert (await kit.post("/v1/completions", **ask))[0] == 503


async def test_a_new_threshold_applies_locally_before_the_journal_returns_it_and_without_a_journal() -> None:
    async with frontend(ScriptedWorker("w1"), admission_control="token-capacity") as kit:
        await post(kit, model="m", active_decode_blocks_threshold=0.5)
        await post(kit, model="m", active_prefill_tokens_threshold=7)
        kit.tell(*())
        (now,) = await listed(kit)
        assert (now["active_decode_blocks_threshold"], now["active_prefill_tokens_threshold"]) == (0.5, 7)
        fold(kit)
        assert await listed(kit) == [now]


async def test_without_admission_control_no_request_is_refused_whatever_is_set() -> None:
    worker = ScriptedWorker("w1", kv_used=60)
    async with frontend(worker) as kit:
        assert await listed(kit) == []
        await until(lambda: (load := kit.plane.load("w1")) is not None and load.kv_used == 60)
        assert (await post(kit, model="m", active_decode_blocks_threshold=0.1))[0] == 200
        fold(kit)
        assert await listed(kit) == [{"model": "m", **NONE, "active_decode_blocks_threshold": 0.1}]
        assert (await kit.post("/v1/completions", model="m", prompt=[300], max_tokens=2))[0] == 200


async def test_an_unknown_model_has_no_thresholds_and_cannot_get_any() -> None:
    async with frontend(ScriptedWorker("w1")) as kit:
        assert await post(kit, model="x") == (200, {"model": "x", **NONE})
        assert await post(kit, model="x", active_prefill_tokens_threshold=1) == (
            404,
            {"error": "Model 'x' not found. Thresholds can only be set for discovered models."},
        )
        assert not kit.said(BusyThresholdsSet)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "m", "active_decode_blocks_threshold": 1.2}, 400, "between 0.0 and 1.0, got 1.2"),
        ({"model": "m", "active_prefill_tokens_threshold": -1}, 400, "must be 0 or more, got -1"),
        ({"model": "m", "active_prefill_tokens_threshold_frac": -2}, 400, "finite number from 0 up, got -2"),
        ({"active_decode_blocks_threshold": 0.5}, 422, "model: Field required"),
        ({"model": 7}, 422, "model: "),
        ({"model": "m", "active_prefill_tokens_threshold": 1.5}, 422, "active_prefill_tokens_threshold: "),
        ({"model": "m", "active_decode_blocks_threshold": "0.5"}, 422, "active_decode_blocks_threshold: "),
        (["m"], 422, "dictionary"),
    ],
)
async def test_invalid_values_are_refused_in_dynamos_format(body: Any, status: int, says: str) -> None:
    async with (
        frontend(ScriptedWorker("w1")) as kit,
        kit.http.post(kit.admin + "/busy_threshold", json=body) as answer,
    ):
        said = await answer.json()
        assert (answer.status, list(said)) == (status, ["error"]) and says in said["error"], said
        assert not kit.said(BusyThresholdsSet)


async def test_a_body_that_is_not_json_or_not_declared_as_json_is_refused() -> None:
    async with frontend(ScriptedWorker("w1")) as kit:
        url = kit.admin + "/busy_threshold"
        async with kit.http.post(url, data=b"{", headers={"Content-Type": "application/json"}) as answer:
            assert (answer.status, list(await answer.json())) == (400, ["error"])
        async with kit.http.post(url, data=b"{}", headers={"Content-Type": "text/plain"}) as answer:
            assert answer.status == 415
            assert "Expected request with `Content-Type: application/json`" in (await answer.json())["error"]


@pytest.mark.parametrize("opened", [False, True])
async def test_clients_can_use_it_only_if_enabled(opened: bool) -> None:
    """Setting thresholds can reject all traffic, so it is disabled for clients by default."""
    async with frontend(ScriptedWorker("w1"), admin_api=opened) as kit:
        for ask in (kit.http.get, kit.http.post):
            async with ask(kit.url + "/busy_threshold") as answer:
                assert (answer.status == 404) is not opened
