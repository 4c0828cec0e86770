"""Pages of other sites may use the API from a browser only if their origins are configured."""

from typing import Any

import pytest
from frontend_kit import Kit, frontend
from scripted_worker import ScriptedWorker

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
APP = "https://app.example.com"
ALLOWED = "Access-Control-Allow-Origin"


async def allowed(
    kit: Kit, origin: str, method: str = "POST", path: str = "/v1/chat/completions", **more: Any
) -> str | None:
    body: dict[str, Any] = {} if method in ("GET", "OPTIONS") else {"json": CHAT}
    headers = {"Origin": origin, **more}
    async with kit.http.request(method, kit.url + path, headers=headers, **body) as answer:
        await answer.read()
        return answer.headers.get(ALLOWED)


async def test_it_is_off_by_default() -> None:
    async with frontend(ScriptedWorker()) as kit:
        assert await allowed(kit, APP) is None and await allowed(kit, APP, "GET", "/v1/models") is None
        async with kit.http.options(kit.url + "/v1/models", headers={"Origin": APP}) as answer:
            assert answer.status == 405


@pytest.mark.parametrize(("origins", "found"), [((APP,), APP), (("*",), "*")])
async def test_page_of_a_configured_origin_may_use_every_path(origins: tuple[str, ...], found: str) -> None:
    async with frontend(ScriptedWorker(), cors_origins=origins, api_key_file="") as kit:
        assert await allowed(kit, APP) == found, "on the fast path"
        assert await allowed(kit, APP, "GET", "/v1/models") == found
        assert await allowed(kit, APP, "GET", "/nowhere") == found, (
            "errors too: the page must be able to read them"
        )
        other = await allowed(kit, "https://evil.example")
        assert other == ("*" if found == "*" else None)
        events = {"Origin": APP}
        async with kit.http.post(
            kit.url + "/v1/chat/completions", json=CHAT | {"stream": True}, headers=events
        ) as answer:
            assert answer.headers[ALLOWED] == found and answer.headers["X-Accel-Buffering"] == "no"
            assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
            await answer.read()


async def test_a_preflight_request_is_answered_without_a_key(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789\n")
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with frontend(ScriptedWorker(), cors_origins=(APP,), api_key_file=str(keys)) as kit:
        async with kit.http.options(
            kit.url + "/v1/chat/completions", headers={"Origin": APP, **asks}
        ) as answer:
            assert (answer.status, answer.headers[ALLOWED]) == (204, APP)
            assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        async with kit.http.options(
            kit.url + "/v1/models", headers={"Origin": "https://evil.example", **asks}
        ) as answer:
            assert answer.status == 403 and ALLOWED not in answer.headers
        async with kit.http.get(kit.url + "/v1/models", headers={"Origin": APP}) as answer:
            assert answer.status == 401 and answer.headers[ALLOWED] == APP
