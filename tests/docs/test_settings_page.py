"""docs/reference/settings.md has every setting of every role, its flags, and the seeds' names."""

import pytest
import reference_docs
from settings_page import PAGE, entries, renewed

from controller.config.flags import ALIASES, FIXED, flatten
from controller.config.sections import section
from controller.config.variables import SECTIONS


def test_the_tables_match_the_settings() -> None:
    page = PAGE.read_text()
    assert renewed(page) == page, "run `python tests/docs/settings_page.py`"


@pytest.mark.slow
@pytest.mark.parametrize("role", [*SECTIONS, "worker"])
def test_every_setting_has_a_description(role: str) -> None:
    assert not [entry.variable for entry in entries(role) if len(entry.says) < 4]


@pytest.mark.slow
@pytest.mark.parametrize("role", SECTIONS)
def test_no_setting_is_missing(role: str) -> None:
    known = {name.replace(".", "__").upper() for name, _ in flatten(section(role)(), role)}
    assert {entry.variable.removeprefix("HOLDFAST_") for entry in entries(role)} == known


def test_a_seeds_name_maps_to_an_existing_setting() -> None:
    known = {name for role in SECTIONS for name, _ in flatten(section(role)(), role)}
    for place, own in ALIASES.items():
        if "*" not in place:
            assert f"{place.rpartition('.')[0]}.{own}" in known
        assert place not in known
    assert not known & FIXED.keys()


@pytest.mark.slow
def test_the_schema_of_the_configuration_file_is_the_generated_one() -> None:
    kept = (PAGE.parent / reference_docs.CONFIG_SCHEMA).read_text()
    assert kept == reference_docs.config_schema(), "run `python tests/fixtures/reference_docs.py`"
