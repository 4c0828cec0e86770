"""Discovery by EndpointSlices, against a double of the Kubernetes API server with list and watch."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from worker_life import Eventually

from workers.config.upstreams import UpstreamEntry
from workers.upstreams.endpoint_slices import ApiFailed, KubernetesApi, SliceDiscovery, SliceSet, VersionGone

POOL = UpstreamEntry(name="pool", url="http://vllm.gpus.svc:8000", discover="kubernetes")


def endpoint(address: str, ready: bool | None = True, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": {"ready": ready, **conditions}}


def slice_of(name: str, *endpoints: dict[str, Any], version: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "endpoints": list(endpoints)}


def event(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": item}


def listed(*items: dict[str, Any], version: int = 1) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(items)}


def test_a_list_and_its_events_give_the_ready_addresses() -> None:
    found = SliceSet()
    found.listed(
        listed(slice_of("s1", endpoint("a"), endpoint("b", None)), slice_of("s2", endpoint("c", False)))
    )
    assert (found.addresses, found.error, found.version) == (["a", "b"], "", "1")
    found.event(event("MODIFIED", slice_of("s2", endpoint("c"), version=2)))
    found.event(event("BOOKMARK", {"metadata": {"resourceVersion": "3"}}))
    assert (found.addresses, found.version) == (["a", "b", "c"], "3")
    found.event(event("DELETED", slice_of("s1", version=4)))
    assert found.addresses == ["c"]


def test_a_pod_that_only_serves_while_it_terminates_gets_no_new_requests() -> None:
    found = SliceSet()
    found.listed(listed(slice_of("s1", endpoint("a"), endpoint("b", False, serving=True, terminating=True))))
    assert found.addresses == ["a"]


def test_an_error_of_the_watch_is_a_new_list_or_a_reason() -> None:
    with pytest.raises(VersionGone):
        SliceSet().event(event("ERROR", {"code": 410, "message": "too old resource version"}))
    with pytest.raises(ApiFailed, match="the watch failed: out of memory"):
        SliceSet().event(event("ERROR", {"code": 500, "message": "out of memory"}))


@dataclass
class ApiServer:
    """A double of the API server: one list, and events for the present watch."""

    items: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    lists: int = 0
    watches: list[str] = field(default_factory=list)  # the version from which each watch began
    queries: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    events: "asyncio.Queue[dict[str, Any] | None]" = field(default_factory=asyncio.Queue)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers["Authorization"])
        if self.status != 200:
            return web.Response(status=self.status)
        if "watch" not in request.query:
            self.lists += 1
            self.queries.append(f"{request.path}?{request.query_string}")
            return web.json_response(listed(*self.items, version=10 * self.lists))
        self.watches.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while (one := await self.events.get()) is not None:
            line = json.dumps(one).encode() + b"\n"
            await response.write(line[:5])  # events arrive in pieces
            await response.write(line[5:])
        return response


@dataclass
class World:
    """The double, a service account, and the discovery that follows the Service."""

    server: ApiServer
    account: Path
    found: SliceDiscovery
    changes: list[list[str]]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    (tmp_path / "token").write_text("t1\n")
    server, app = ApiServer([slice_of("s1", endpoint("10.0.0.1"))]), web.Application()
    app.add_routes([web.get("/{path:.*}", server.answer)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    changes: list[list[str]] = []
    found = SliceDiscovery(
        POOL, lambda: changes.append(found.found.addresses), KubernetesApi(server.url, tmp_path), wait_s=0.01
    )
    running = asyncio.ensure_future(found.run())
    yield World(server, tmp_path, found, changes)
    running.cancel()
    await asyncio.wait((running,))
    await runner.cleanup()
    await asyncio.sleep(0.05)  # connections are closed in the loop's next rounds


async def test_pods_come_and_go(world: World, eventually: Eventually) -> None:
    await eventually(lambda: world.server.watches == ["10"])
    assert world.server.queries == [
        "/apis/discovery.k8s.io/v1/namespaces/gpus/endpointslices?labelSelector=kubernetes.io/service-name%3Dvllm"
    ]
    both = slice_of("s1", endpoint("10.0.0.1"), endpoint("10.0.0.2"), version=11)
    world.server.events.put_nowait(event("MODIFIED", both))
    await eventually(lambda: world.changes == [["10.0.0.1"], ["10.0.0.1", "10.0.0.2"]])
    leaving = slice_of("s1", endpoint("10.0.0.1", False, serving=True), endpoint("10.0.0.2"), version=12)
    world.server.events.put_nowait(event("MODIFIED", leaving))
    await eventually(lambda: world.changes[-1] == ["10.0.0.2"])
    assert [entry.name for entry in world.found.entries()] == ["pool-10-0-0-2"]
    assert world.server.tokens == {"Bearer t1"}


async def test_a_version_that_is_gone_is_listed_again(world: World, eventually: Eventually) -> None:
    await eventually(lambda: world.server.watches == ["10"])
    world.server.items = [slice_of("s1", endpoint("10.0.0.9"))]
    world.server.events.put_nowait(event("ERROR", {"code": 410}))
    world.server.events.put_nowait(None)
    await eventually(lambda: world.changes[-1] == ["10.0.0.9"])
    assert world.found.found.error == ""


async def test_a_watch_that_ends_is_begun_again(world: World, eventually: Eventually) -> None:
    await eventually(lambda: world.server.watches == ["10"])
    world.server.events.put_nowait(None)
    await eventually(lambda: world.server.watches == ["10", "20"])
    assert world.changes == [["10.0.0.1"]]


async def test_the_last_set_stays_while_the_api_server_refuses(world: World, eventually: Eventually) -> None:
    await eventually(lambda: world.server.watches)
    world.server.status = 403
    world.server.events.put_nowait(None)
    await eventually(
        lambda: "answers 403: allow the service account to list and watch" in world.found.found.error
    )
    assert world.found.found.addresses == ["10.0.0.1"]
    (world.account / "token").write_text("t2\n")
    world.server.status = 200
    await eventually(lambda: world.found.found.error == "")
    assert "Bearer t2" in world.server.tokens, "a rotated token is used"


async def test_without_a_service_account_the_reason_is_shown(world: World, eventually: Eventually) -> None:
    await eventually(lambda: world.server.watches)
    (world.account / "token").unlink()
    world.server.events.put_nowait(None)
    await eventually(lambda: "token cannot be read: No such file" in world.found.found.error)
