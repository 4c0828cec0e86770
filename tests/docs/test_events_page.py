"""docs/events.md and docs/asyncapi.yaml are what the code says, and the consumer on the page runs."""

import asyncio
import gzip
import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from controller import catalogue
from controller.adapters.asyncapi import document
from controller.commands import write_docs
from events import codec
from events.journal.nats import NatsJournal
from events.observations import WorkerHeard

ROOT = Path(__file__).parents[2]
DOCS, RELEASES, SAMPLES = ROOT / "docs", ROOT / "tests/fixtures", ROOT / "tests/events/facts/samples"
AGAIN = "run `python -m controller.commands.write_docs`"
UNIT = re.compile(r"_(ms|s|rps|tokens)$|^pid$")


def test_the_asyncapi_document_is_the_generated_one() -> None:
    assert (DOCS / "asyncapi.yaml").read_text() == document(), AGAIN


def test_the_catalogue_is_the_generated_one() -> None:
    page = (DOCS / "events.md").read_text()
    assert write_docs.renewed(page) == page, AGAIN


def test_the_schemas_are_the_generated_ones() -> None:
    folder = DOCS / "schemas"
    kept = {str(page.relative_to(folder)): page.read_text() for page in folder.rglob("*.json")}
    assert kept == write_docs.schemas(), AGAIN


@pytest.mark.parametrize("kind", list(codec.KINDS))
def test_a_recorded_sample_of_each_kind_passes_its_schema_and_nothing_else_does(kind: str) -> None:
    sample = json.loads((SAMPLES / f"{kind}.json").read_text())["body"]
    schema = json.loads(write_docs.schemas()[f"v1/{kind}.json"])
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    validator.validate(sample | {"a_field_of_a_newer_release": 1})
    for field in schema["required"]:
        assert not validator.is_valid({name: value for name, value in sample.items() if name != field}), field
        assert not validator.is_valid(sample | {field: [{"no": "such thing"}]}), field


@pytest.mark.parametrize(
    "release", sorted(RELEASES.glob("*/journal.jsonl.gz")), ids=lambda one: one.parent.name
)
def test_what_a_release_has_written_passes_the_schemas_of_today(release: Path) -> None:
    with gzip.open(release, "rt") as lines:
        messages = [json.loads(line) for line in lines]
    schemas = {name: Draft202012Validator(json.loads(text)) for name, text in write_docs.schemas().items()}
    for message in messages:
        kind = message["headers"]["ce-type"].removeprefix("holdfast.")
        body = message["body"]
        schemas[f"v1/{kind}.json"].validate(json.loads(body) if isinstance(body, str) else body)
    assert len(messages) > 100


def test_every_kind_is_on_both_pages_with_every_field() -> None:
    page = (DOCS / "events.md").read_text()
    schemas = yaml.safe_load((DOCS / "asyncapi.yaml").read_text())["components"]["schemas"]
    for entry in catalogue.entries():
        assert f"#### {entry.kind}\n" in page
        assert entry.promise, f"{entry.kind} has no docstring"
        properties = schemas[entry.fact.__name__]["properties"]
        assert list(properties) and set(properties) == {field.name for field in entry.fields}
        for field in entry.fields:
            assert f"| `{field.name}` |" in page


def test_what_fields_consist_of_is_on_the_page() -> None:
    page = (DOCS / "events.md").read_text()
    types = {name for e in catalogue.entries() for f in e.fields for name in re.findall(r"[A-Z]\w+", f.type)}
    for name in types - {"Literal", "None", "Any"}:
        assert f"#### {name}\n" in page, f"a field is a {name}: {AGAIN}"


def test_what_a_field_counts_or_measures_is_said() -> None:
    """By its note, or by the unit at the end of its name."""
    silent = {
        f"{entry.kind}.{field.name}"
        for entry in catalogue.entries()
        for field in entry.fields
        if field.type.split(" |")[0] in ("int", "float") and not field.note and not UNIT.search(field.name)
    }
    assert silent == set()


def test_every_observation_has_somebody_who_says_it() -> None:
    kinds = {entry.kind for entry in catalogue.entries() if not entry.decided}
    assert set(catalogue.EMITTERS) == kinds


def test_the_operators_subjects_are_in_the_document() -> None:
    channels = yaml.safe_load((DOCS / "asyncapi.yaml").read_text())["channels"]
    addresses = {channel["address"] for channel in channels.values()}
    assert {
        f"control.{verb}" for verb in ("drain", "resume", "move", "restart", "status", "chaos")
    } <= addresses
    assert "fleet.observed.worker.{worker}.canary_failed" in addresses
    assert "fleet.decided.health_changed" in addresses


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks"):
        write_docs.renewed("# Events\n")


# --- the consumer -----------------------------------------------------------------------------------------


def program() -> str:
    """Return the consumer that the page shows."""
    (found,) = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "events.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return str(found)


def test_the_consumer_has_twenty_lines() -> None:
    assert len([line for line in program().splitlines() if line.strip()]) <= 20


async def follow(file: Path, url: str, wanted: int) -> list[dict[str, object]]:
    """Run the program until it has printed so many lines, then kill it as a crash would."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(file),
        "audit",
        "fleet.observed.>",
        env={**os.environ, "HOLDFAST_NATS_URL": url},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    rows = []
    try:
        async with asyncio.timeout(20):
            while len(rows) < wanted:
                rows.append(json.loads(await process.stdout.readline()))
    finally:
        process.kill()
        await process.communicate()
    return rows


@pytest.mark.servers
async def test_the_consumer_goes_on_where_it_stopped(nats_url: str, tmp_path: Path) -> None:
    file = tmp_path / "consumer.py"
    file.write_text(program())
    journal = await NatsJournal.connect(nats_url, "test:docs", tmp_path / "spool")
    try:
        said = [journal.observe(WorkerHeard(worker="w1", instance=f"i{n}", observer="o")) for n in range(5)]
        assert await journal.flush(5)
        first = await follow(file, nats_url, 5)
        assert [row["id"] for row in first] == said
        assert first[0]["kind"] == "holdfast.worker_heard"
        assert first[0]["instance"] == "i0"
        later = [
            journal.observe(WorkerHeard(worker="w1", instance=f"i{n}", observer="o")) for n in range(5, 8)
        ]
        assert await journal.flush(5)
        second = await follow(file, nats_url, 3)
    finally:
        await journal.close()
    fresh = [row["id"] for row in second if row["id"] not in said]
    assert fresh == later[: len(fresh)] and fresh


def test_every_kind_can_be_decoded() -> None:
    assert {entry.kind for entry in catalogue.entries()} == set(codec.KINDS)
