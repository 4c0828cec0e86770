"""Determines the version and the commit that `holdfast --version` prints."""

import json
import os
import subprocess
from contextlib import suppress
from importlib.metadata import Distribution, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIT_S = 1.0  # timeout of git in seconds


def version_text() -> str:
    """Return the program's name and version, followed by the commit if the commit is known."""
    package = distribution("holdfast")
    commit = commit_of_checkout(ROOT) or commit_of_installation(package)
    return f"holdfast {package.version}" + (f" ({commit})" if commit else "")


def commit_of_checkout(root: Path) -> str:
    """Return the abbreviated commit of the git checkout at `root`.

    The result is "" if `root` is not a checkout, or if git fails or takes longer than GIT_S (1) second."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_S, check=True, env=environment
        ).stdout.strip()
    return ""


def commit_of_installation(package: Distribution) -> str:
    """Return the abbreviated commit from which pip installed a package (PEP 610).

    The result is "" if pip did not install the package from a repository."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(package.read_text("direct_url.json") or "{}")["vcs_info"]["commit_id"])[:7]
    return ""
