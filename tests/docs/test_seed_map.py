"""docs/concepts/seed-map.md maps each class of the seeds to this project; every target must exist."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "seed-map.md"
ROWS = re.findall(r"^\| `([A-Za-z_.: /-]+)` \| (.+?) \| .*\|$", PAGE.read_text(), re.MULTILINE)


def targets() -> list[str]:
    return sorted({target for _, where in ROWS for target in re.findall(r"`([a-z_.]+:[A-Za-z_.]+)`", where)})


def test_the_page_maps_every_class_of_the_failure_seed() -> None:
    named = {name for name, _ in ROWS}
    assert {
        "CanaryHealthChecker", "HealthState", "CircuitBreaker", "RequestMigration", "CapacityModel",
        "GracefulDegradation", "PriorityRouter", "HealthDaemon", "RetryManager",
    } <= named  # fmt: skip


@pytest.mark.parametrize("seed", ["000", "001", "002", "003", "004"])
def test_each_seed_has_a_section_with_targets(seed: str) -> None:
    section = re.search(rf"^## Seed {seed}: .*?(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None and re.search(r"`[a-z_.]+:[A-Za-z_.]+`", section.group())


@pytest.mark.parametrize("target", targets())
def test_the_target_exists(target: str) -> None:
    module, _, path = target.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
