"""Grafana's own published types accept every dashboard, and refuse one that is wrong."""

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
    "a name that there is not": lambda board: first(board, "stat").update(gridpos={}),
    "a string for a number": lambda board: first(board, "stat")["gridPos"].update(w="12"),
    "a mode that there is not": lambda board: first(board, "stat")["options"].update(colorMode="backgroud"),
    "an option of another panel": lambda board: first(board, "stat")["options"].update(rowHeight=1),
    "an option that is missing": lambda board: first(board, "timeseries")["options"].pop("legend"),
    "a field option that there is not": lambda board: first(board, "timeseries")["fieldConfig"]["defaults"]["custom"].update(
        lineWidht=1
    ),
    "a step without its colour": lambda board: first(board, "stat")["fieldConfig"]["defaults"]["thresholds"]["steps"][0].pop(
        "color"
    ),
    "a variable of no type": lambda board: board["templating"]["list"][0].pop("type"),
    "a schema that is no number": lambda board: board.update(schemaVersion="39"),
}  # fmt: skip


def spoilt(spoil: Callable[[Json], object]) -> str:
    board = json.loads(text(BOARDS[0]))
    spoil(board)
    return typescript(board)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the compiler says of the dashboards, and of one that is wrong in each way: all at once, for it begins slowly."""
    compiler()
    files = {board.uid: typescript(json.loads(text(board))) for board in BOARDS}
    files |= {name.replace(" ", "-"): spoilt(spoil) for name, spoil in WRONG.items()}
    return complaints(tmp_path_factory.mktemp("typescript"), files)


@pytest.mark.parametrize("board", [board.uid for board in BOARDS])
def test_grafanas_types_accept_a_dashboard(board: str, said: dict[str, list[str]]) -> None:
    assert said[board] == []


@pytest.mark.parametrize("wrong", WRONG)
def test_they_refuse_one_that_is_wrong(wrong: str, said: dict[str, list[str]]) -> None:
    assert said[wrong.replace(" ", "-")]


def test_without_them_a_sentence_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("published_types.COMPILER", tmp_path / "none")
    with pytest.raises(pytest.skip.Exception, match="make grafana-types"):
        compiler()
