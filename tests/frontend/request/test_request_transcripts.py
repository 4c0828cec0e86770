"""Transcripts of a frontend's handling of each failure: commands with their recorded effects.

A transcript is a text file in `transcripts/`. A command is followed by its effects, which are indented:

    # What this step shows.
    w1 disconnects
        w2 <- generate r1 tokens=3+2 …      what a worker was sent: prompt + replayed tokens
        r1 -> tokens 3                      what the client received; a token that no undisturbed answer has there is marked
        fact request_migrated r1 …          what was observed, without fields that have their default
        counted attempt_failed …            counters that were increased
        now parked=1                        gauges that have changed

`case` starts a new frontend, `frontend` sets its settings, `worker` adds a worker, `request` sends a client's request, `journal`
makes the frontend read a fact. Only `wait` advances (virtual) time; its effects have their times. `Script` in `transcript.py`
lists all commands. If the requests of a case leave anything behind, that is recorded, too.

    pytest tests/frontend/request/test_request_transcripts.py --rewrite-transcripts

records all effects again. Review the difference like code: the transcripts are the specification.
"""

from difflib import unified_diff
from pathlib import Path

import pytest
from transcript import CANNOT, play, transcripts


def difference(path: Path, recorded: str, found: str) -> str:
    """Return the difference between the recorded and the found transcript; empty if there is none."""
    lines = unified_diff(recorded.splitlines(), found.splitlines(), path.name, "now", lineterm="", n=8)
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("path", transcripts(), ids=lambda path: path.stem)
def test_a_transcript_matches(path: Path, request: pytest.FixtureRequest) -> None:
    recorded = path.read_text()
    found = play(recorded)
    if request.config.getoption("rewrite_transcripts"):
        path.write_text(found)
        return
    if different := difference(path, recorded, found):
        pytest.fail(
            f"{different}\n\nIs the change intended? --rewrite-transcripts records it.", pytrace=False
        )


@pytest.mark.parametrize("path", transcripts(), ids=lambda path: path.stem)
def test_a_transcript_starts_with_its_description(path: Path) -> None:
    first, _, _ = path.read_text().partition("\n\n")
    assert all(line.startswith("# ") for line in first.splitlines())


@pytest.mark.parametrize("path", transcripts(), ids=lambda path: path.stem)
def test_a_transcript_has_no_errors(path: Path) -> None:
    assert CANNOT not in path.read_text() and "LEFT BEHIND" not in path.read_text()


def test_there_are_transcripts() -> None:
    assert len(transcripts()) > 20


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("r1 -> tokens 1..3", "r1 -> tokens 1..2"),  # another effect
        ("    r1 -> done\n", ""),  # one effect less
        ("    r1 -> done\n", "    r1 -> done\n    r1 -> done\n"),  # one effect more
        ("w1 sends r1 tokens=3", "w1 sends r1 tokens=2 wrong=1"),  # another script
    ],
)
def test_a_damaged_transcript_fails(was: str, becomes: str) -> None:
    (path,) = (path for path in transcripts() if path.stem == "undisturbed")
    damaged = path.read_text().replace(was, becomes, 1)
    assert damaged != path.read_text()
    assert difference(path, damaged, play(damaged))


def test_playing_twice_gives_the_same_result() -> None:
    (path,) = (path for path in transcripts() if path.stem == "connection_broken")
    assert play(path.read_text()) == play(path.read_text())
