"""Grafana's published types accept every dashboard, and reject invalid ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published_types import compiler, complaints, typescript

from grafana.write import BOARDS, text

Json = dict[str, Any]


def first(board: Json, kind: str) -> Json:
    found: Json = next(panel for panel in board["panels"] if panel["type"] == kind)
    return found


WRONG: dict[str, Callable[[Json], object]] = {
    "an unknown name": lambda board: first(board, "stat").update(gridpos={}),
    "a string for a number": lambda board: first(board, "stat")["gridPos"].update(w="12"),
    "an unknown mode": lambda board: first(board, "stat")["options"].update(colorMode="backgroud"),
    "an option of another panel": lambda board: first(board, "stat")["options"].update(rowHeight=1),
    "a missing option": lambda board: first(board, "timeseries")["options"].pop("legend"),
    "an unknown field option": lambda board: first(board, "timeseries")["fieldConfig"]["defaults"]["custom"].update(
        lineWidht=1
    ),
    "a step without its colour": lambda board: first(board, "stat")["fieldConfig"]["defaults"]["thresholds"]["steps"][0].pop(
        "color"
    ),
    "a variable without a type": lambda board: board["templating"]["list"][0].pop("type"),
    "a schema version that is not a number": lambda board: board.update(schemaVersion="39"),
}  # fmt: skip


def spoilt(spoil: Callable[[Json], object]) -> str:
    board = json.loads(text(BOARDS[0]))
    spoil(board)
    return typescript(board)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The compiler's errors for the dashboards and for each invalid variant, in one run because it starts slowly."""
    compiler()
    files = {board.uid: typescript(json.loads(text(board))) for board in BOARDS}
    files |= {name.replace(" ", "-"): spoilt(spoil) for name, spoil in WRONG.items()}
    return complaints(tmp_path_factory.mktemp("typescript"), files)


@pytest.mark.parametrize("board", [board.uid for board in BOARDS])
def test_grafanas_types_accept_a_dashboard(board: str, errors: dict[str, list[str]]) -> None:
    assert errors[board] == []


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_grafanas_types_reject_an_invalid_dashboard(wrong: str, errors: dict[str, list[str]]) -> None:
    assert errors[wrong.replace(" ", "-")]


def test_without_the_types_the_skip_reason_says_how_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("published_types.COMPILER", tmp_path / "none")
    with pytest.raises(pytest.skip.Exception, match="make grafana-types"):
        compiler()
