"""The workers' tests run on the loop that workers run on."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import llamacpp
import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test here on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


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
