"""A projector that has found a loss waits until the store was made anew, and not for ever."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from benchmarks.virtual_loop import VirtualLoop
from controller.processes.children import Child
from controller.processes.losses.store_mending import FINDING, OFTEN, StoreMending
from events.errors import Finding


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def run(*args: object, **named: object) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **named))

    return run


class Rebuilds:
    """Plays `holdfast replay rebuild`."""

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
async def test_the_projector_waits_for_the_rebuild_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds()
    mending = StoreMending(tmp_path, rebuilds)
    mending.ended(child, FINDING)
    assert (child.restart, rebuilds.made) == (False, 0)
    await asyncio.sleep(2)
    assert (child.restart, rebuilds.made) == (True, 1)
    said = capsys.readouterr()
    assert said.err == "rows are missing from incidents.\n"
    assert said.out == "the state store was made anew from the journal: projected 9 events anew\n"


@virtual
async def test_other_ends_are_no_loss(tmp_path: Path) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds()
    mending = StoreMending(tmp_path, rebuilds)
    mending.ended(child, 1)
    mending.ended(Child("controller", "controller", [], tmp_path / "log"), FINDING)
    await asyncio.sleep(2)
    assert child.restart and rebuilds.made == 0
    await mending.stop()


@virtual
async def test_a_rebuild_that_fails_says_why_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds(Finding("no room on the disk"))
    mending = StoreMending(tmp_path, rebuilds)
    mending.ended(child, FINDING)
    await asyncio.sleep(2)
    assert child.restart
    assert "the state store cannot be made anew: no room on the disk" in capsys.readouterr().err
    mending.ended(child, FINDING)
    await asyncio.sleep(2)
    assert child.restart and rebuilds.made == 2


@virtual
async def test_a_store_that_is_lost_again_and_again_is_not_rebuilt_without_a_pause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds()
    mending = StoreMending(tmp_path, rebuilds)
    for _ in range(OFTEN + 1):
        mending.ended(child, FINDING)
        await asyncio.sleep(2)
    assert (child.restart, rebuilds.made) == (False, OFTEN)
    assert "was lost 3 times" in capsys.readouterr().err
    await asyncio.sleep(600)
    assert (child.restart, rebuilds.made) == (True, OFTEN + 1)
    mending.ended(child, FINDING)
    await mending.stop()  # in the middle of it
    assert rebuilds.made == OFTEN + 1
