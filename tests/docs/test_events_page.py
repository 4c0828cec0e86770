"""docs/reference/events.md, docs/reference/asyncapi.yaml and docs/reference/schemas match the code."""

import gzip
import json
import re
from pathlib import Path

import pytest
import reference_docs
import yaml
from jsonschema import Draft202012Validator

from controller import catalogue
from controller.adapters.control_api import document
from events import codec

ROOT = Path(__file__).parents[2]
DOCS, RELEASES, SAMPLES = ROOT / "docs", ROOT / "tests/fixtures", ROOT / "tests/events/facts/samples"
AGAIN = "run `python tests/fixtures/reference_docs.py`"
UNIT = re.compile(r"_(ms|s|rps|tokens)$|^pid$")


def test_the_asyncapi_document_is_the_generated_one() -> None:
    assert (DOCS / "reference" / "asyncapi.yaml").read_text() == document(), AGAIN


@pytest.mark.slow
def test_the_catalogue_is_the_generated_one() -> None:
    page = (DOCS / "reference" / "events.md").read_text()
    assert reference_docs.renewed(page) == page, AGAIN


def test_the_schemas_are_the_generated_ones() -> None:
    folder = DOCS / "reference" / "schemas"
    kept = {str(page.relative_to(folder)): page.read_text() for page in folder.rglob("*.json")}
    assert kept == reference_docs.schemas(), AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(codec.KINDS))
def test_a_recorded_sample_of_each_kind_passes_its_schema_and_nothing_else_does(kind: str) -> None:
    sample = json.loads((SAMPLES / f"{kind}.json").read_text())["body"]
    schema = json.loads(reference_docs.schemas()[f"v1/{kind}.json"])
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    validator.validate(sample | {"a_field_of_a_newer_release": 1})
    for field in schema["required"]:
        assert not validator.is_valid({name: value for name, value in sample.items() if name != field}), field
        assert not validator.is_valid(sample | {field: [{"no": "such thing"}]}), field


@pytest.mark.parametrize(
    "release", sorted(RELEASES.glob("*/journal.jsonl.gz")), ids=lambda one: one.parent.name
)
def test_events_written_by_a_release_pass_the_current_schemas(release: Path) -> None:
    with gzip.open(release, "rt") as lines:
        messages = [json.loads(line) for line in lines]
    schemas = {
        name: Draft202012Validator(json.loads(text)) for name, text in reference_docs.schemas().items()
    }
    for message in messages:
        if "ce-type" not in message["headers"]:
            continue  # not an event: readers skip it
        kind = message["headers"]["ce-type"].removeprefix("holdfast.")
        body = message["body"]
        schemas[f"v1/{kind}.json"].validate(json.loads(body) if isinstance(body, str) else body)
    assert len(messages) > 100


@pytest.mark.slow
def test_every_kind_is_on_both_pages_with_every_field() -> None:
    page = (DOCS / "reference" / "events.md").read_text()
    schemas = yaml.safe_load((DOCS / "reference" / "asyncapi.yaml").read_text())["components"]["schemas"]
    for entry in catalogue.entries():
        assert f"#### {entry.kind}\n" in page
        assert entry.promise, f"{entry.kind} has no docstring"
        properties = schemas[entry.fact.__name__]["properties"]
        assert list(properties) and set(properties) == {field.name for field in entry.fields}
        for field in entry.fields:
            assert f"| `{field.name}` |" in page


def test_the_types_of_fields_are_on_the_page() -> None:
    page = (DOCS / "reference" / "events.md").read_text()
    types = {name for e in catalogue.entries() for f in e.fields for name in re.findall(r"[A-Z]\w+", f.type)}
    for name in types - {"Literal", "None", "Any"}:
        assert f"#### {name}\n" in page, f"a field is a {name}: {AGAIN}"


def test_every_number_has_a_unit_or_a_note() -> None:
    """A note, or a unit at the end of the field's name."""
    silent = {
        f"{entry.kind}.{field.name}"
        for entry in catalogue.entries()
        for field in entry.fields
        if field.type.split(" |")[0] in ("int", "float") and not field.note and not UNIT.search(field.name)
    }
    assert silent == set()


def test_every_observation_has_an_emitter() -> None:
    kinds = {entry.kind for entry in catalogue.entries() if not entry.decided}
    assert set(catalogue.EMITTERS) == kinds


def test_the_operators_subjects_are_in_the_document() -> None:
    channels = yaml.safe_load((DOCS / "reference" / "asyncapi.yaml").read_text())["channels"]
    addresses = {channel["address"] for channel in channels.values()}
    assert {
        f"control.{verb}" for verb in ("drain", "resume", "move", "restart", "status", "chaos")
    } <= addresses
    assert "fleet.observed.worker.{worker}.canary_failed" in addresses
    assert "fleet.decided.health_changed" in addresses


def test_a_page_without_its_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks"):
        reference_docs.renewed("# Events\n")


def test_every_kind_can_be_decoded() -> None:
    assert {entry.kind for entry in catalogue.entries()} == set(codec.KINDS)
