"""A projector that has found a loss is restarted after the store was rebuilt, with a rate limit."""

from pathlib import Path

import pytest
from waits import virtual

from benchmarks.virtual_loop import VirtualLoop
from controller.processes.children import Child
from controller.processes.store_rebuilder import FINDING, OFTEN, StoreRebuilder
from events.errors import Finding

LOOP = VirtualLoop


class Rebuilds:
    """A fake of `holdfast replay rebuild`."""

    def __init__(self, *ends: str | Exception) -> None:
        self.ends = list(ends)
        self.made = 0

    async def __call__(self, data: Path) -> str:
        self.made += 1
        await virtual(1)
        end = self.ends.pop(0) if self.ends else "projected 9 events anew"
        if isinstance(end, Exception):
            raise end
        return end


def a_projector(tmp_path: Path) -> Child:
    log = tmp_path / "projector.log"
    log.write_text("holdfast: rows are missing from incidents.\n")
    return Child("projector", "projector", [], log)


async def test_the_projector_waits_for_the_rebuild_which_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds()
    rebuilder = StoreRebuilder(tmp_path, rebuilds)
    rebuilder.ended(child, FINDING)
    assert (child.restart, rebuilds.made) == (False, 0)
    await virtual(2)
    assert (child.restart, rebuilds.made) == (True, 1)
    output = capsys.readouterr()
    assert output.err == "rows are missing from incidents.\n"
    assert output.out == "the state store was rebuilt from the journal: projected 9 events anew\n"


async def test_other_exits_cause_no_rebuild(tmp_path: Path) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds()
    rebuilder = StoreRebuilder(tmp_path, rebuilds)
    rebuilder.ended(child, 1)
    rebuilder.ended(Child("controller", "controller", [], tmp_path / "log"), FINDING)
    await virtual(2)
    assert child.restart and rebuilds.made == 0
    await rebuilder.stop()


async def test_a_failed_rebuild_is_reported_and_retried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds(Finding("no room on the disk"))
    rebuilder = StoreRebuilder(tmp_path, rebuilds)
    rebuilder.ended(child, FINDING)
    await virtual(2)
    assert child.restart
    assert "the state store cannot be rebuilt: no room on the disk" in capsys.readouterr().err
    rebuilder.ended(child, FINDING)
    await virtual(2)
    assert child.restart and rebuilds.made == 2


async def test_rebuilds_of_a_repeatedly_lost_store_are_rate_limited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child, rebuilds = a_projector(tmp_path), Rebuilds()
    rebuilder = StoreRebuilder(tmp_path, rebuilds)
    for _ in range(OFTEN + 1):
        rebuilder.ended(child, FINDING)
        await virtual(2)
    assert (child.restart, rebuilds.made) == (False, OFTEN)
    assert "was lost 3 times" in capsys.readouterr().err
    await virtual(600)
    assert (child.restart, rebuilds.made) == (True, OFTEN + 1)
    rebuilder.ended(child, FINDING)
    await rebuilder.stop()  # during the rebuild
    assert rebuilds.made == OFTEN + 1
