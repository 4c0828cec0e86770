"""`holdfast --version` prints the version and, if known, the commit of the checkout or installation."""

import re
import subprocess
from importlib.metadata import PathDistribution, version
from pathlib import Path

import pytest

from controller.cli import main
from controller.commands.version import ROOT, commit_of_checkout, commit_of_installation


def test_the_version_has_the_commit_of_the_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    commit = commit_of_checkout(ROOT)
    assert shown == f"holdfast {version('holdfast')}" + (f" ({commit})" if commit else "") + "\n"


def test_the_commit_is_that_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))
    assert commit_of_checkout(tmp_path) == ""
    monkeypatch.delenv("GIT_DIR")
    own = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*own, "init", "-q"], check=True)
    assert commit_of_checkout(tmp_path) == "", "there is no commit"
    subprocess.run([*own, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))
    assert re.fullmatch(r"[0-9a-f]{7,}", commit_of_checkout(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of_checkout(tmp_path) == "", "there is no git"


@pytest.mark.parametrize(
    ("content", "commit"),
    [
        ('{"url": "https://x", "vcs_info": {"vcs": "git", "commit_id": "a861f15c0ffee"}}', "a861f15"),
        ('{"url": "file:///x", "dir_info": {"editable": true}}', ""),
        ("[]", ""),
        ("{", ""),
        (None, ""),
    ],
)
def test_the_commit_of_an_installation_is_that_of_pip(
    content: str | None, commit: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "direct_url.json").write_text(content)
    assert commit_of_installation(PathDistribution(tmp_path)) == commit
