"""Attacks and faults on whole fleets: `make test-attacks`, and the first part of `make attack`."""

import pytest
from store_databases import empty_database_url

__all__ = ["empty_database_url"]


@pytest.fixture(autouse=True, scope="session")
def _databases(databases: None) -> None:
    """Every fleet's database is a copy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/attacks/"):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.attack)
