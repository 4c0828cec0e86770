"""A fleet's files are private to its user: the directory, and the content of logs."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from controller.processes.fleet_dir import restrict
from events.process import logs
from events.wire import without_quotes

WORDS = "Zitronenfalter"


def modes(place: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (place, *place.rglob("*"))}


def fleet(place: Path) -> Path:
    """Create a directory as an older release left it: readable by all users."""
    for name in ("run", "spool/w0", "nats/store", "postgres/data"):
        (place / name).mkdir(parents=True)
    for name in (
        "version",
        "fleet.json",
        "run/w0.json",
        "spool/w0/acknowledged.json",
        "postgres/data/PG_VERSION",
    ):
        (place / name).write_text("1")
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return place


def test_a_directory_of_an_older_release_is_restricted_completely(tmp_path: Path) -> None:
    place = fleet(tmp_path / "fleet")
    outside = tmp_path / "outside"
    outside.write_text("x")
    outside.chmod(0o644)
    (place / "run" / "link").symlink_to(outside)
    assert restrict(place) == []
    found = modes(place)
    left = {
        "PG_VERSION",
        "link",
    }  # PostgreSQL restricts its own files; the target of a link is not the fleet's
    assert {name for name, mode in found.items() if mode & 0o077} == left
    assert found["fleet.json"] == 0o600 and found["spool"] == found["fleet"] == 0o700
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644


def test_a_directory_with_foreign_files_stays_open_and_the_files_are_reported(
    tmp_path: Path,
) -> None:
    place = fleet(tmp_path / "home")
    (place / "letters").mkdir(mode=0o755)
    assert restrict(place) == ["letters"]
    found = modes(place)
    assert found["home"] == found["letters"] == 0o755
    assert found["run"] == 0o700 and found["w0.json"] == 0o600
    place.chmod(0o700)
    assert restrict(place) == []  # no other user can read it


MASKS = """
import os
from controller import cli
for command in ("up", "controller", "projector", "frontend", "worker", "demo", "status"):
    os.umask(0o022)
    assert cli.main([command]) == 2, "all of them reject an unknown setting"
    print(command, oct(os.umask(0)))
"""


@pytest.mark.slow
def test_commands_that_write_into_a_fleets_directory_create_private_files() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MASKS],
        env={**os.environ, "HOLDFAST_ODD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    masks = dict(line.split() for line in ended.stdout.splitlines())
    assert masks.pop("status") == "0o22"
    assert set(masks.values()) == {"0o77"} and len(masks) == 6


def test_a_log_has_the_traceback_of_an_exception_without_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure()
    log = structlog.get_logger("test")

    def fail() -> None:
        try:
            int(WORDS)
        except ValueError as error:
            raise ExceptionGroup(WORDS, [KeyError(WORDS), OSError(2, "No such file", WORDS)]) from error

    try:
        fail()
    except ExceptionGroup:
        log.exception("request_failed")
    output = capsys.readouterr().err
    assert WORDS not in output
    for expected in ("builtins.ValueError", "in fail", "builtins.ExceptionGroup", "builtins.KeyError"):
        assert expected in output
    assert "builtins.FileNotFoundError: No such file" in output


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (f"engine_error: the upstream answers 500: {WORDS}", "engine_error: the upstream answers 500 …"),
        (f"engine_error: the upstream reports an error: {WORDS}: {WORDS}", "engine_error: the upstream reports an error …"),
        (f"engine_error: the upstream sent what is not JSON: {WORDS}\n", "engine_error: the upstream sent what is not JSON …"),
        (f"engine_error: the upstream calls '{WORDS}' a token id", "engine_error: the upstream calls …"),
        (f"engine_error: the upstream ended the request itself ({WORDS})",
         "engine_error: the upstream ended the request itself …"),
        (f"engine_error: the upstream's connection broke: {WORDS}", "engine_error: the upstream's connection broke …"),
        (f"engine_error: the upstream's logprobs of a prompt cannot be read: {WORDS}",
         "engine_error: the upstream's logprobs of a prompt cannot be read …"),
        ("engine_error: the upstream answers 500", "engine_error: the upstream answers 500"),
        ("engine_error: CUDA error: device-side assert", "engine_error: CUDA error: device-side assert"),
        ("engine_shutdown: told to", "engine_shutdown: told to"),
    ],
)  # fmt: skip
def test_an_engine_error_is_recorded_without_quoting_the_server(error: str, kept: str) -> None:
    assert without_quotes(error) == kept


def test_every_error_that_quotes_a_server_is_known(pytestconfig: pytest.Config) -> None:
    """A new error message that quotes a server must also be truncated in facts and logs."""
    sources = Path(pytestconfig.rootpath / "workers" / "engines" / "openai").glob("*.py")
    quoting = [
        line
        for path in sources
        for line in path.read_text().splitlines()
        if re.search(r"engine_error: .*\{", line)
    ]
    own = (
        "tokens asked for",
        "gives the logprobs of {len",
        "LINE_BYTES_MAX",
        "WHOLE_BYTES_MAX",
        "in the worker",
    )  # numbers and names that do not come from a server
    assert len(quoting) >= 6
    for line in quoting:
        sentence = re.sub(r"\{[^}]*status\}", "500", line[line.index("engine_error") :])
        sentence = re.sub(r"\{[^}]*\}", WORDS, sentence)
        assert WORDS not in without_quotes(sentence) or any(words in line for words in own), line
