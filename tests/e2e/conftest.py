"""Fleets take as long as all the rest: the end-to-end tests come first, so that the other tests fill up what they leave."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _databases(databases: None) -> None:
    """Every fleet's database is a copy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
    items.sort(key=lambda item: here not in item.path.parents)
