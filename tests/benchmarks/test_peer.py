"""The comparison with Dynamo: its message without Dynamo, and the counts in its table."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import peer
from benchmarks.peers.peer_systems import PROMPTS, make_model
from controller.demo.clients import Received
from controller.frontend.openai.text.tokenizer import load_tokens


def test_without_dynamo_it_says_how_to_install_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for python in (tmp_path / "nothing", Path(sys.executable)):
        assert peer.main(["--dynamo-python", str(python)]) == 2
        assert capsys.readouterr().err.strip() == peer.MISSING


def test_the_table_has_medians_and_pools_the_faults() -> None:
    fault = {"streams": 24, "lost": 0, "altered": 1, "struck": 8, "pauses_ms": [30.0, 50.0]}
    mute = fault | {"lost": 8, "pauses_ms": []}
    results: dict[str, dict[str, list[Any]]] = {
        "TTFT": {"Dynamo": [44.0, 43.0, 1234.5], "Holdfast": [0.5, 0.25, 0.75]},
        "hang": {"Dynamo": [mute, mute], "Holdfast": [fault, fault | {"pauses_ms": [40.0]}]},
    }
    assert peer.table(results).splitlines()[2:] == [
        "| TTFT | 44.0 (43.0–1,234) | 0.50 (0.25–0.75) |",
        "| hang: streams lost, altered, of all (of those struck) | 16, 2, of 48 (16) | 0, 2, of 48 (16) |",
        "| hang: pause p50 / p99, ms | none continued | 40.0 / 50.0 |",
    ]


def test_a_pause_begins_with_the_fault_and_may_follow_a_token_in_flight() -> None:
    stream = Received("r", 0, 5, sent=0.0, times=[1.0, 1.02, 1.03, 1.09, 1.11])
    assert peer.pause(stream, 1.025) == pytest.approx(0.06)
    assert peer.pause(stream, 1.031) == pytest.approx(0.059)


def test_the_model_that_dynamo_serves_has_our_tokenizer(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    ours, theirs = load_tokens("builtin:sim"), load_tokens(str(tmp_path / "model"))
    assert theirs.encode("def main(argv):", special=False) == ours.encode("def main(argv):", special=False)
    assert len({prompt[0] for prompt in PROMPTS}) == len(PROMPTS)  # requests are told apart by it
