"""The version and the commit that `holdfast --version` prints."""

import json
import os
import subprocess
from contextlib import suppress
from importlib.metadata import Distribution, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIT_S = 1.0


def version_text() -> str:
    """Return the version, with the commit if it is known."""
    package = distribution("holdfast")
    commit = commit_of_checkout(ROOT) or commit_of_installation(package)
    return f"holdfast {package.version}" + (f" ({commit})" if commit else "")


def commit_of_checkout(root: Path) -> str:
    """Return the abbreviated commit of the git checkout at `root`; empty if `root` is none, or git exceeds GIT_S seconds."""
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
    """Return the abbreviated commit that pip installed the package from; empty if pip's source was no repository (PEP 610)."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(package.read_text("direct_url.json") or "{}")["vcs_info"]["commit_id"])[:7]
    return ""
