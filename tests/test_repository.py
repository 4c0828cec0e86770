"""The files beside the code: licence, changelog, hosted CI, hooks."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_the_hosted_workflow_is_valid_and_runs_the_same_as_ours() -> None:
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    tool = Path(sys.executable).with_name("check-jsonschema")
    subprocess.run(
        [tool, "--builtin-schema", "vendor.github-workflows", workflow],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (job,) = yaml.safe_load(workflow.read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make install", ".ci/run"]


def test_each_hook_runs_a_tool_of_the_environment() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"].split()[0] for repository in config["repos"] for hook in repository["hooks"]]
    assert entries
    for entry in entries:
        assert Path(sys.executable).with_name(Path(entry).name).exists(), entry


def test_the_licence_is_apache_2() -> None:
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
    assert re.search(r'^license = "Apache-2\.0"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_version_and_changelog_agree() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    headings = re.findall(
        r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == version and all(date for _, date in headings[1:])
