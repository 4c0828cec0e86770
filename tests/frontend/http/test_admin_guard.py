"""The admin port is guarded against other sites' pages, other host names and other hosts."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from frontend_kit import frontend
from scripted_worker import ScriptedWorker

from controller.processes.controller_admin import serve, url_of
from events.observations import BusyThresholdsSet
from events.process.admin_guard import VARIABLE, is_local, own_hosts, refusal
from workers.admin.server import PageAnswer, Pages

THRESHOLD = {"model": "m", "active_decode_blocks_threshold": 0.5}
EVIL = [
    {"Host": "evil.example"},
    {"Host": "evil.example:9000"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("headers", EVIL)
async def test_a_frontends_admin_port_refuses_requests_of_other_sites_pages(
    headers: dict[str, str],
) -> None:
    async with frontend(ScriptedWorker()) as kit:
        for method, path, body in (
            ("POST", "/busy_threshold", THRESHOLD),
            ("POST", "/route", {"prompt": "a"}),
            ("GET", "/busy_threshold", None),
            ("GET", "/metrics", None),
            ("GET", "/health", None),
            ("GET", "/nowhere", None),
        ):
            async with kit.http.request(method, kit.admin + path, json=body, headers=headers) as answer:
                assert answer.status == 403, (method, path)
                assert (await answer.json())["error"]["code"] == "admin_refused"
        assert not kit.said(BusyThresholdsSet)


async def test_the_operator_on_this_host_and_prometheus_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "holdfast, .internal.example")
    async with frontend(ScriptedWorker()) as kit:
        async with kit.http.post(kit.admin + "/busy_threshold", json=THRESHOLD) as answer:
            assert answer.status == 200
        for host in (
            "holdfast:9100",
            "HOLDFAST",
            "f1.internal.example:9100",
            "10.0.0.7:9100",
            "[::1]:9100",
            "localhost",
        ):
            async with kit.http.get(kit.admin + "/metrics", headers={"Host": host}) as answer:
                assert answer.status == 200, host
        async with kit.http.get(kit.admin + "/metrics", headers={"Host": "internal.example.evil"}) as answer:
            assert answer.status == 403


async def test_another_host_may_read_but_needs_an_admin_key_for_changes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ops:sk-admin-0123456789\n")

    def asked(method: str, path: str, key: str = "", peer: str = "10.0.0.9") -> web.BaseRequest:
        transport = Mock()
        ends = {"peername": (peer, 4711), "sockname": ("10.0.0.7", 9100)}
        transport.get_extra_info = lambda name, default=None: ends.get(name, default)
        headers = {"Host": "10.0.0.7:9100"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return make_mocked_request(method, path, headers=headers, transport=transport)

    locked: dict[str, Any] = {"admin_key_file": str(path)}
    for settings, key, expected in (
        ({}, "", 403),
        ({}, "sk-admin-0123456789", 403),
        (locked, "", 403),
        (locked, "sk-wrong-0123456789", 403),
    ):
        async with frontend(ScriptedWorker(), **settings) as kit:
            for where in ("/busy_threshold", "/route"):
                assert (await kit.api.admin(asked("POST", where, key))).status == expected
            assert (await kit.api.admin(asked("GET", "/live"))).status == 200
    async with frontend(ScriptedWorker(), admin_key_file=str(path)) as kit:
        answer: Any = await kit.api.admin(asked("POST", "/busy_threshold", "sk-admin-0123456789"))
        assert answer.status == 415, "it passed the guard, but has no JSON body"
        assert (await kit.api.admin(asked("POST", "/busy_threshold", peer="10.0.0.7"))).status == 415


@pytest.mark.parametrize(
    ("peer", "own", "local"),
    [
        (("127.0.0.1", 1), ("127.0.0.1", 2), True),
        (("::1", 1, 0, 0), ("::1", 2, 0, 0), True),
        (("::ffff:127.0.0.1", 1, 0, 0), ("::ffff:127.0.0.1", 2, 0, 0), True),
        (("10.0.0.7", 1), ("10.0.0.7", 2), True),
        (("10.0.0.9", 1), ("10.0.0.7", 2), False),
        (("::ffff:10.0.0.9", 1, 0, 0), ("::ffff:10.0.0.7", 2, 0, 0), False),
        (None, None, False),
        ("", "", False),
    ],
)
def test_connections_from_this_host_are_recognized(peer: object, own: object, local: bool) -> None:
    assert is_local(peer, own) is local


@pytest.mark.parametrize("headers", EVIL)
async def test_ports_of_controllers_and_workers_are_guarded_the_same_way(headers: dict[str, str]) -> None:
    runner = await serve(lambda: b"metrics", lambda: {"ready": True}, "127.0.0.1", 0)
    pages = Pages({"/metrics": lambda: PageAnswer(b"metrics")})
    port = await pages.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as http:
            for url in (url_of(runner), f"http://127.0.0.1:{port}"):
                async with http.get(f"{url}/metrics", headers=headers) as answer:
                    assert answer.status == 403
                async with http.get(f"{url}/metrics") as answer:
                    assert (answer.status, await answer.read()) == (200, b"metrics")
    finally:
        pages.close()
        await runner.cleanup()


def test_a_request_without_a_host_is_not_from_a_browser() -> None:
    assert refusal({}, own_hosts({})) == ""
