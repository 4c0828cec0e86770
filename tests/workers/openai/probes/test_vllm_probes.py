"""Opt-in (make test-vllm): what a vLLM server answers directly, it also answers through a fleet.

Each probe is run on a server, then on a fleet in front of it and another one.
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

EVERY_MIN = 300
KNOWN = {
    "operations-the_tokens_of_a_chat_by_another_template": "no template of a client is rendered by a frontend",
}
"""By probe: why it fails through a fleet."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def check(name: str, probe: Probe, servers: Fronted) -> None:
    """Fail unless a probe passes directly, and through the fleet with the same result."""
    failed, why = compared(probe, servers.direct, servers.through)
    assert not failed, f"directly: {failed}"
    if name in KNOWN:
        assert why, "it passes: remove it from KNOWN"
        pytest.xfail(KNOWN[name])
    assert not why, why


def test_there_are_enough_probes() -> None:
    assert len(probes_of(*GENERATING, pooling, reasoning)) >= EVERY_MIN


@pytest.mark.parametrize(("name", "probe"), probes_of(*GENERATING).items())
def test_a_probe_of_texts(name: str, probe: Probe, texts: Fronted) -> None:
    check(name, probe, texts)


@pytest.mark.parametrize(("name", "probe"), probes_of(completions, streams, chats, constrained).items())
def test_a_probe_in_proxied_mode(name: str, probe: Probe, texts: Fronted) -> None:
    through = Server(texts.through.url, {"X-Holdfast-Mode": "proxied"})
    check(name, probe, texts._replace(through=through))


@pytest.mark.parametrize(("name", "probe"), probes_of(pooling).items())
def test_a_probe_of_vectors(name: str, probe: Probe, vectors: Fronted) -> None:
    check(name, probe, vectors)


@pytest.mark.parametrize(("name", "probe"), probes_of(reasoning).items())
def test_a_probe_of_reasoning(name: str, probe: Probe, thinking: Fronted) -> None:
    check(name, probe, thinking)
