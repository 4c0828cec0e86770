"""The file of `holdfast golden export` and `import`: round trip, and errors that name their position."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from controller.commands.goldens import commands, file
from controller.deciders.golden import Golden
from controller.deciders.votes import Vote

KEY = "llama|r1|tok|openai|0.9|unknown|tp1|upstream"
TOP = ((5, -0.1), (7, -2.5))
AGREED = Golden(
    KEY, "c1", "agreed", (9, 8), (5, 6), (TOP, TOP), 0.5, 0.01, by=("w0", "operator ann"), asked=4,
    moved_by=7,
)  # fmt: skip
DECIDED_AT = {7: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)}
PROVISIONAL = Golden(KEY, "c2", prompt=(9,), tokens=(1,), proposed_by="w0")


def entry(**more: Any) -> dict[str, Any]:
    return {"canary_key": KEY, "canary": "c1", "prompt": [9, 8], "tokens": [5, 6], **more}


def saved(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "goldens.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def of(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"format": file.FORMAT, "goldens": list(entries)}


def test_agreed_goldens_survive_a_round_trip_and_provisional_ones_are_omitted(
    tmp_path: Path,
) -> None:
    found = file.read(saved(tmp_path, file.written([AGREED, PROVISIONAL])))
    (answer,) = found[KEY]
    assert (answer.canary, answer.prompt, answer.tokens, answer.top_k) == ("c1", (9, 8), (5, 6), (TOP, TOP))
    assert (answer.tolerance, answer.asked) == (0.01, 4)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ({"goldens": [entry()]}, "missing required field `format`"),
        ({"format": "x", "goldens": [entry()]}, "Invalid enum value 'x' - at `format`"),
        (of(), "Expected `array` of length >= 1 - at `goldens`"),
        (of(entry(), entry(tokens=[-1])), "at `goldens[1].tokens[0]`"),
        (of(entry(tokens=[])), "at `goldens[0].tokens`"),
        (of(entry(colour="red")), "unknown field `colour`"),
        (of(entry(tolerance=-1)), "at `goldens[0].tolerance`"),
        (of(entry(canary_key="llama")), "goldens[0] (c1): 'llama' is not a canary key"),
        (of(entry(), entry()), "goldens[1] (c1): duplicate golden of this canary"),
        (of(entry(top_k=[[[5, -0.1]]])), "goldens[0] (c1): top_k has 1 positions, tokens 2"),
        (of(entry(top_k=[[[5, -0.1]], []])), "goldens[0] (c1): top_k[1] has 0 tokens"),
        (of(entry(asked=1)), "goldens[0] (c1): asked is 1, but there are 2 tokens"),
        (
            of(entry(tokens=[1] * 4096, top_k=[[[5, -0.123456789]] * 64] * 4096)),
            "bytes exceed the limit of 409,600",
        ),
    ],
)
def test_an_invalid_golden_is_rejected_with_its_position(tmp_path: Path, content: Any, says: str) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(file.BadGoldenFile) as refused:
        file.read(path)
    assert str(refused.value).startswith(str(path))
    assert says in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(file.BadGoldenFile, match=r"cannot read .*missing\.json: No such file"):
        file.read(tmp_path / "missing.json")


def test_goldens_are_sent_in_batches_that_fit_into_an_event(tmp_path: Path) -> None:
    big = [entry(canary=f"c{n}", prompt=[9] * 50_000) for n in range(9)]
    answers = file.read(saved(tmp_path, of(*big)))[KEY]
    batches = list(file.batches(answers))
    assert [one["canary"] for batch in batches for one in batch] == [f"c{n}" for n in range(9)]
    assert len(batches) > 1
    assert all(len(json.dumps(batch)) < 1_000_000 for batch in batches)


def test_list_shows_status_time_and_supporters_and_escapes_names_for_the_terminal() -> None:
    contradicted = Golden(
        "\x1b[2J|r|t|e|v|d|tp1|x", "c9", "agreed", by=("w1",), contradictions=(Vote("w2", "i", (1,)),)
    )
    shown = commands.text([AGREED, PROVISIONAL, contradicted], DECIDED_AT)
    assert "c1  agreed       2026-01-02 03:04:05 UTC  w0, operator ann" in shown
    assert f"c2  provisional  {'-':23}  proposed by w0" in shown
    assert "w1; contradicted by w2" in shown
    assert "\x1b" not in shown
    first = json.loads(commands.as_json([AGREED], DECIDED_AT))[0]
    assert (first["model"], first["canary"], first["status"], first["by"]) == (
        "llama", "c1", "agreed", ["w0", "operator ann"]
    )  # fmt: skip
    assert commands.text([], {}) == ""
