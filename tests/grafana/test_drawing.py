"""The pictures of the dashboards: each dashboard has one, and results are converted for drawing."""

import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from draw_dashboards import BYTES_MAX, PICTURES, ROOT, bucket_counts, column, gaps_shown, named

from grafana.model import Dashboard
from grafana.write import BOARDS

AT = datetime(2026, 1, 1, tzinfo=UTC)
PAGE = (ROOT / "docs" / "operations" / "observability.md").read_text()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_each_dashboard_has_a_picture_that_the_page_shows(board: Dashboard) -> None:
    picture: Path = PICTURES / f"{board.uid.removeprefix('holdfast-')}.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size <= BYTES_MAX
    assert f"[{board.title}](dashboards/{picture.name})" in PAGE


def test_every_picture_belongs_to_a_dashboard() -> None:
    assert {one.stem for one in PICTURES.iterdir()} == {
        board.uid.removeprefix("holdfast-") for board in BOARDS
    }


def test_each_kind_of_panel_is_drawn() -> None:
    kinds = {panel.kind for board in BOARDS for panel in board.panels()}
    drawn = {*re.findall(r"case '([\w-]+)':", (ROOT / "grafana" / "drawing.tsx").read_text()), "timeseries"}
    assert kinds <= drawn


@pytest.mark.parametrize(
    ("legend", "name"), [("with {{worker_id}}", "with w0"), ("all", "all"), ("", "w0"), ("{{none}}!", "!")]
)
def test_a_series_is_named_by_its_legend(legend: str, name: str) -> None:
    assert named(legend, {"__name__": "up", "worker_id": "w0"}) == name


def test_columns_have_grafanas_types() -> None:
    assert column("at", [None, AT]) == {"name": "at", "type": "time", "values": [None, AT.timestamp() * 1e3]}
    assert column("n", [Decimal("1.5"), None])["values"] == [1.5, None]
    assert [column("x", [value])["type"] for value in (1, 1.0, True, "a", None)] == [
        "number", "number", "boolean", "string", "string",
    ]  # fmt: skip


def test_gaps_are_not_bridged_by_lines() -> None:
    assert gaps_shown([(10.5, "1"), (12.5, "2")], (10.5, 13.6)) == [
        (10.5, "1"),
        (11.5, None),
        (12.5, "2"),
        (13.5, None),
    ]


def test_a_histograms_buckets_are_shown_as_separate_counts() -> None:
    found = bucket_counts(
        [("+Inf", [(1, "5"), (2, "9")]), ("0.01", [(1, "2"), (2, "2")]), ("0.1", [(1, "5"), (2, "8")])]
    )
    assert found == [
        ("≤ 10 ms", [(1, 2.0), (2, 2.0)]), ("≤ 100 ms", [(1, 3.0), (2, 6.0)]), ("more", [(1, 0.0), (2, 1.0)]),
    ]  # fmt: skip
