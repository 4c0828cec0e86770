"""What strangers, clients and machines may do to a whole fleet: `make test-attacks`, and the first part of `make attack`."""

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
            item.add_marker(pytest.mark.attack)
