"""Real upstream servers, where they are installed."""

from collections.abc import Iterator

import llamacpp
import pytest
import vllm_servers


@pytest.fixture(scope="session")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[llamacpp.LlamaServer]]:
    """Two llama-servers with the same model. A test that breaks one must revive it."""
    if (made := llamacpp.folder()) is None:
        pytest.skip(f"{llamacpp.FOLDER} names no folder: make test-llamacpp")
    logs = tmp_path_factory.mktemp("llamas")
    servers = [llamacpp.LlamaServer.start(made, logs / f"{name}.log") for name in "ab"]
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def vllms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[vllm_servers.VllmServer]]:
    """Two vLLM servers with the same model. A test that breaks one must revive it."""
    if (made := vllm_servers.folder()) is None:
        pytest.skip(f"{vllm_servers.FOLDER} names no folder: make test-vllm")
    logs = tmp_path_factory.mktemp("vllms")
    servers = vllm_servers.VllmServer.start(made, [logs / f"{name}.log" for name in "ab"])
    yield servers
    for server in servers:
        server.kill()
