"""Runs the end-to-end tests first: fleets take as long as all other tests, which fill the gaps."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _databases(databases: None) -> None:
    """Every fleet's database is a copy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = "tests/e2e/"
    for item in items:
        if item.nodeid.startswith(here):
            item.add_marker(pytest.mark.e2e)
    items.sort(key=lambda item: not item.nodeid.startswith(here))
