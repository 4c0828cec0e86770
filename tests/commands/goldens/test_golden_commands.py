"""`holdfast golden` on a fleet of one worker: approve, list, export, retire and import."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fleet import holdfast, running
from waits import until

from benchmarks.local_fleet import LocalFleet
from events.decisions import GoldenAgreed, GoldenRetired
from events.observations import GoldenRequested

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.attack]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory, databases: None) -> AsyncIterator[LocalFleet]:
    flags = ("--workers", "1", "--itl-ms", "2", "--canary-interval", "2")
    async with running(tmp_path_factory.mktemp("goldens") / "fleet", *flags) as made:
        await made.healthy(1)
        yield made


async def typed(fleet: LocalFleet, *arguments: str) -> tuple[int, str]:
    done = await asyncio.to_thread(holdfast, "golden", *arguments, "--data", str(fleet.data))
    return done.returncode, done.stdout + done.stderr


async def listed(fleet: LocalFleet, wanted: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Return the goldens once the projection satisfies `wanted`."""

    async def found() -> list[dict[str, Any]] | None:
        _, text = await typed(fleet, "list", "-o", "json")
        goldens: list[dict[str, Any]] = json.loads(text)
        return goldens if wanted(goldens) else None

    return await until(found, 60, "the wanted list of goldens", every_s=0.5)


def all_of(status: str) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda found: len(found) >= 4 and {one["status"] for one in found} == {status}


async def test_goldens_are_approved_exported_retired_and_imported_and_each_step_is_on_the_journal(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    await listed(fleet, all_of("provisional"))
    code, output = await typed(fleet, "approve", "--model", "sim")
    assert (code, "become agreed" in output) == (0, True)
    agreed = await listed(fleet, all_of("agreed"))
    assert all(one["by"][0].startswith("operator") and one["by"][1:] == ["w0"] for one in agreed)
    assert all(one["since"] for one in agreed)
    assert (await typed(fleet, "list", "--model", "m9"))[1] == "no goldens of model 'm9'\n"
    assert (await typed(fleet, "list"))[1].count(" UTC  operator ") == len(agreed)

    path = tmp_path / "goldens.json"
    assert (await typed(fleet, "export", "-o", str(path)))[0] == 0
    exported = json.loads(path.read_text())["goldens"]
    assert {one["canary"] for one in exported} == {one["canary"] for one in agreed}

    first = exported[0]["canary"]
    assert (await typed(fleet, "retire", "--model", "sim", "--canary", first))[0] == 0
    await listed(fleet, lambda found: {one["status"] for one in found} > {"agreed"})
    code, output = await typed(fleet, "import", str(path))
    assert (code, first in output) == (0, True)
    assert await listed(fleet, all_of("agreed"))

    code, output = await typed(fleet, "approve", "--model", "sim")
    assert (code, "no provisional golden" in output) == (1, True)
    path.write_text(path.read_text().replace('"tokens": [', '"tokens": [-1, ', 1))
    code, output = await typed(fleet, "import", str(path))
    assert (code, "goldens[0].tokens[0]" in output) == (1, True)

    facts = [event.fact for event in await fleet.events()]
    requests = [fact for fact in facts if isinstance(fact, GoldenRequested)]
    assert [fact.act for fact in requests] == ["approve", "retire", "approve"]
    assert all(fact.command and fact.until and fact.by for fact in requests)
    assert any(
        isinstance(fact, GoldenRetired) and fact.reason.startswith("retire: operator") for fact in facts
    )
    assert any(isinstance(fact, GoldenAgreed) and fact.by[0].startswith("operator") for fact in facts)
