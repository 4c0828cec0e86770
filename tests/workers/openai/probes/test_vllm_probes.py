"""Opt-in (make test-vllm): what a vLLM server answers directly, it also answers through a fleet.

Each probe is run on a server, then on a fleet in front of two such servers. A probe that fails directly is skipped: this server
does not support it.
"""

import chats
import completions
import constrained
import pooling
import pytest
import reasoning
import streams
from every import GENERATING, compared, probes_of
from fronted import Fronted
from probe import Probe, Server

PASSED_MIN = 300
KNOWN = {
    "operations-the_tokens_of_a_chat_by_another_template": "no template of a client is rendered by a frontend",
}
"""By probe: why it fails through a fleet."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def passed() -> set[str]:
    """The names of the probes that pass directly."""
    return set()


def check(name: str, probe: Probe, servers: Fronted, passed: set[str]) -> None:
    """Fail if a probe passes directly, but not through the fleet."""
    failed, why = compared(probe, servers.direct, servers.through)
    if failed:
        pytest.skip(f"the server itself fails: {failed[:200]}")
    passed.add(name)
    if name in KNOWN:
        assert why, "remove it from KNOWN"
        pytest.xfail(KNOWN[name])
    assert not why, why


@pytest.mark.parametrize(("name", "probe"), probes_of(*GENERATING).items())
def test_a_probe_of_texts(name: str, probe: Probe, texts: Fronted, passed: set[str]) -> None:
    check(name, probe, texts, passed)


@pytest.mark.parametrize(("name", "probe"), probes_of(completions, streams, chats, constrained).items())
def test_a_probe_in_proxied_mode(name: str, probe: Probe, texts: Fronted) -> None:
    through = Server(texts.through.url, {"X-Holdfast-Mode": "proxied"})
    check(name, probe, texts._replace(through=through), set())


@pytest.mark.parametrize(("name", "probe"), probes_of(pooling).items())
def test_a_probe_of_vectors(name: str, probe: Probe, vectors: Fronted, passed: set[str]) -> None:
    check(name, probe, vectors, passed)


@pytest.mark.parametrize(("name", "probe"), probes_of(reasoning).items())
def test_a_probe_of_reasoning(name: str, probe: Probe, thinking: Fronted, passed: set[str]) -> None:
    check(name, probe, thinking, passed)


def test_enough_probes_pass_directly(passed: set[str]) -> None:
    assert len(passed) >= PASSED_MIN
