"""The guide to many upstreams: its example is valid, and its tables name every field and state."""

import re
from pathlib import Path

import jsonschema
import pytest
import reference_docs
import yaml

from workers.config.upstreams import UpstreamEntry, UpstreamLimits, parse_upstreams, upstreams_schema

ROOT = Path(__file__).parent.parent.parent.parent
GUIDE = (ROOT / "docs" / "guides" / "upstreams.md").read_text()
EXAMPLE = GUIDE.partition("```yaml\n")[2].partition("```")[0]


def test_the_schema_is_up_to_date() -> None:
    kept = (ROOT / "docs" / "reference" / reference_docs.UPSTREAMS_SCHEMA).read_text()
    assert kept == reference_docs.upstreams_schema_text(), "run `python tests/fixtures/reference_docs.py`"


def test_the_example_is_valid() -> None:
    assert [entry.name for entry in parse_upstreams(EXAMPLE.encode())] == ["gpu1", "gpu2", "gpu3"]
    jsonschema.validate(yaml.safe_load(EXAMPLE), upstreams_schema())


@pytest.mark.parametrize(
    "wrong",
    [
        "{}",
        "upstreams: [{name: a}]",
        "upstreams: []\ndefaults: {url: a}",
        "upstreams: [{name: a, url: b, x: c}]",
    ],
)
def test_the_schema_refuses_what_the_parser_refuses(wrong: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(wrong), upstreams_schema())


def test_every_field_has_a_row() -> None:
    table = GUIDE.partition("## Fields")[2].partition("\n## ")[0]
    rows = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(.*?)`", row)
    }
    limits = {f"limits.{name}" for name in UpstreamLimits.__struct_fields__}
    assert rows == {*UpstreamEntry.__struct_fields__} - {"limits"} | limits
