"""Real vLLM servers with a model for probes, and fleets in front of them.

They serve the whole session, because the tests of different modules are mixed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fronted import Fronted, fronted
from probe_model import build
from vllm_servers import FOLDER, folder

CALLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--trust-request-chat-template")
VECTORS = ("--runner", "pooling", "--convert", "embed")
THINKING = ("--reasoning-parser", "qwen3", "--structured-outputs-config", '{"enable_in_reasoning": true}')


@pytest.fixture(scope="session")
def probed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template for tools."""
    if (made := folder()) is None:
        pytest.skip(f"{FOLDER} names no folder: make test-vllm")
    return build(made / "tiny", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def texts(probed_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    """Two servers of a model that answers in text."""
    with fronted(tmp_path_factory.mktemp("texts"), probed_model, 2, CALLS) as both:
        yield both


@pytest.fixture(scope="session")
def vectors(probed_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    """A server of a model that computes vectors."""
    with fronted(tmp_path_factory.mktemp("vectors"), probed_model, 1, VECTORS) as both:
        yield both


@pytest.fixture(scope="session")
def thinking(probed_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    """A server of a model that reasons. As on the server, the format of its reasoning is set on the fleet."""
    own = ("--reasoning-parsers", "tiny=qwen3")
    with fronted(tmp_path_factory.mktemp("thinking"), probed_model, 1, (*CALLS, *THINKING), *own) as both:
        yield both
