"""A projector that has found a loss is restarted after the store was rebuilt, with a rate limit."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from benchmarks.virtual_loop import VirtualLoop
from controller.processes.children import Child
from controller.processes.store_rebuilder import FINDING, OFTEN, StoreRebuilder
from events.errors import Finding


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def run(*args: object, **named: object) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **named))

    return run


class Rebuilds:
    """A fake of `holdfast replay rebuild`."""

    def __init__(self, *ends: str | Exception) -> None:
        self.ends = list(ends)
        self.made = 0

    async def __call__(self, data: Path) -> str:
        self.made += 1
        await asyncio.sleep(1)
        end = self.ends.pop(0) if self.ends else "projected 9 events anew"
        if isinstance(end, Exception):
            raise end
        return end


def a_projector(tmp_path: Path) -> Child:
    log = tmp_path / "projector.log"
    log.write_text("holdfast: rows are missing from incidents.\n")
    return Child("projector", "projector", [], log)


@virtual
async def test_the_projector_waits_for_the_rebuild_which_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds()
    rebuilder = StoreRebuilder(tmp_path, rebuilds)
    rebuilder.ended(child, FINDING)
    assert (child.restart, rebuilds.made) == (False, 0)
    await asyncio.sleep(2)
    assert (child.restart, rebuilds.made) == (True, 1)
    output = capsys.readouterr()
    assert output.err == "rows are missing from incidents.\n"
    assert output.out == "the state store was rebuilt from the journal: projected 9 events anew\n"


@virtual
async def test_other_exits_cause_no_rebuild(tmp_path: Path) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds()
    rebuilder = StoreRebuilder(tmp_path, rebuilds)
    rebuilder.ended(child, 1)
    rebuilder.ended(Child("controller", "controller", [], tmp_path / "log"), FINDING)
    await asyncio.sleep(2)
    assert child.restart and rebuilds.made == 0
    await rebuilder.stop()


@virtual
async def test_a_failed_rebuild_is_reported_and_retried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds(Finding("no room on the disk"))
    rebuilder = StoreRebuilder(tmp_path, rebuilds)
    rebuilder.ended(child, FINDING)
    await asyncio.sleep(2)
    assert child.restart
    assert "the state store cannot be rebuilt: no room on the disk" in capsys.readouterr().err
    rebuilder.ended(child, FINDING)
    await asyncio.sleep(2)
    assert child.restart and rebuilds.made == 2


@virtual
async def test_rebuilds_of_a_repeatedly_lost_store_are_rate_limited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds()
    rebuilder = StoreRebuilder(tmp_path, rebuilds)
    for _ in range(OFTEN + 1):
        rebuilder.ended(child, FINDING)
        await asyncio.sleep(2)
    assert (child.restart, rebuilds.made) == (False, OFTEN)
    assert "was lost 3 times" in capsys.readouterr().err
    await asyncio.sleep(600)
    assert (child.restart, rebuilds.made) == (True, OFTEN + 1)
    rebuilder.ended(child, FINDING)
    await rebuilder.stop()  # during the rebuild
    assert rebuilds.made == OFTEN + 1
