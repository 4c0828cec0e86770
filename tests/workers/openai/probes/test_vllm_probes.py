"""Opt-in (make test-vllm): what a vLLM server answers directly, it also answers through a fleet.

Each probe is run on a server, then on a fleet in front of two such servers. A probe that fails directly is skipped: this server
does not support it.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pooling
import pytest
import reasoning
from every import GENERATING, compared, probes_of
from probe import Probe, Server
from probe_model import build
from vllm_servers import FOLDER, VllmServer, folder

from benchmarks.local_fleet import LocalFleet

CALLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
TRUSTING = ("--trust-request-chat-template",)
VECTORS = ("--runner", "pooling", "--convert", "embed")
THINKING = ("--reasoning-parser", "qwen3", "--structured-outputs-config", '{"enable_in_reasoning": true}')
PASSED_MIN = 133
# probes that cannot be repeated in proxied mode: the mode concerns the paths of vLLM's answers alone
Pair = tuple[Server, Server]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template for tools."""
    if (made := folder()) is None:
        pytest.skip(f"{FOLDER} names no folder: make test-vllm")
    return build(made / "tiny", tmp_path_factory.mktemp("model") / "tiny")


@contextlib.contextmanager
def pair(logs: Path, model: Path, servers: int, flags: Sequence[str]) -> Iterator[Pair]:
    """Run servers with these flags, and a fleet in front of them. Yield the first server, and the fleet."""
    made = folder()
    assert made is not None
    running = VllmServer.start(made, [logs / f"{n}.log" for n in range(servers)], model, flags=flags)
    try:
        upstreams = itertools.chain.from_iterable(("--upstream", server.url) for server in running)
        fleet = LocalFleet.start(logs / "fleet", "--engine", "openai", "--model", str(model), *upstreams)
        try:
            asyncio.run(fleet.ready())
            asyncio.run(fleet.healthy(servers, 120.0))
            yield Server(running[0].url), Server(fleet.url)
        finally:
            assert fleet.stop() == 0, fleet.log.read_text()
    finally:
        for server in running:
            server.kill()


@pytest.fixture(scope="module")
def texts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Servers of a model that answers in text."""
    with pair(tmp_path_factory.mktemp("texts"), model, 2, (*CALLS, *TRUSTING)) as both:
        yield both


@pytest.fixture(scope="module")
def vectors(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A server of a model that computes vectors."""
    with pair(tmp_path_factory.mktemp("vectors"), model, 1, VECTORS) as both:
        yield both


@pytest.fixture(scope="module")
def thinking(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A server of a model that reasons."""
    with pair(tmp_path_factory.mktemp("thinking"), model, 1, (*CALLS, *THINKING)) as both:
        yield both


@pytest.fixture(scope="module")
def passed() -> set[str]:
    """The names of the probes that pass directly."""
    return set()


def check(name: str, probe: Probe, servers: Pair, passed: set[str]) -> None:
    """Fail if a probe passes directly, but not through the fleet."""
    failed, why = compared(probe, *servers)
    if failed:
        pytest.skip(f"the server itself fails: {failed[:200]}")
    passed.add(name)
    assert not why, why


@pytest.mark.parametrize(("name", "probe"), probes_of(*GENERATING).items())
def test_a_probe_of_texts(name: str, probe: Probe, texts: Pair, passed: set[str]) -> None:
    check(name, probe, texts, passed)


def test_enough_probes_pass_directly(texts: Pair, passed: set[str]) -> None:
    assert len(passed) >= PASSED_MIN
    print(f"{len(passed)} probes pass directly")


@pytest.mark.parametrize(("name", "probe"), probes_of(pooling).items())
def test_a_probe_of_vectors(name: str, probe: Probe, vectors: Pair, passed: set[str]) -> None:
    check(name, probe, vectors, passed)


@pytest.mark.parametrize(("name", "probe"), probes_of(reasoning).items())
def test_a_probe_of_reasoning(name: str, probe: Probe, thinking: Pair, passed: set[str]) -> None:
    check(name, probe, thinking, passed)
