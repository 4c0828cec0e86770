"""The workers' tests run on the loop that workers run on, or on the one that their file names."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import llamacpp
import pytest
import uvloop
import vllm_servers
from doors import DOORS, Doors, through
from worker_life import begin as begin
from worker_process import spawn as spawn


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test here on uvloop, but for files that name another loop."""
    return {"uvloop": getattr(item.module, "LOOP", uvloop.new_event_loop)}  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[llamacpp.LlamaServer]]:
    """Two llama-servers with the same model. Who breaks one revives it."""
    if (made := llamacpp.folder()) is None:
        pytest.skip(f"{llamacpp.FOLDER} names no folder: make test-llamacpp")
    logs = tmp_path_factory.mktemp("llamas")
    servers = [llamacpp.LlamaServer.start(made, logs / f"{name}.log") for name in "ab"]
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def vllms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[vllm_servers.VllmServer]]:
    """Two vLLM servers with the same model. Who breaks one revives it."""
    if (made := vllm_servers.folder()) is None:
        pytest.skip(f"{vllm_servers.FOLDER} names no folder: make test-vllm")
    logs = tmp_path_factory.mktemp("vllms")
    servers = vllm_servers.VllmServer.start(made, [logs / f"{name}.log" for name in "ab"])
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(params=DOORS)
async def doors(request: pytest.FixtureRequest) -> AsyncIterator[Doors]:
    """How frontends come in: on a port, or through a real broker."""
    if request.param == "tcp":
        yield Doors()
        return
    async with through(request.getfixturevalue("nats_server")) as made:
        yield made
