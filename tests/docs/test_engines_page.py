"""`holdfast up` and docs/guides/engines.md offer every engine of the worker."""

import re
from pathlib import Path

from controller.processes.up_flags import FLAGS
from workers.config.settings import WorkerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "engines.md").read_text()


def engines() -> set[str]:
    """Return the engines of the worker."""
    hint = WorkerSettings.__annotations__["engine"]
    return set(re.findall(r"'(\w+)'", str(hint).partition("Meta")[0]))


def test_holdfast_up_starts_every_engine() -> None:
    assert {"simulated", "openai"} < engines()
    assert set(FLAGS["--engine"]["choices"]) == engines()


def test_the_page_names_every_engine() -> None:
    table = PAGE.partition("| engine |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| \[?`(\w+)`", table, re.MULTILINE)) == engines()
