"""`holdfast up` says who is awaited and why, is ready with who is there, and gives up with a reason."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from controller.processes.readiness.absent import absent, lines
from controller.processes.readiness.watch import ReadinessTimes, ReadinessWatch

AWAY = "cannot connect to http://u"
USUAL = ReadinessTimes()


def status(
    *there: str, awaited: Mapping[str, str] | None = None, joining: str = "", position: int | None = 7
) -> dict[str, Any]:
    workers = [{"id": name, "weight": 1.0, "reasons": []} for name in there]
    if joining:
        workers.append({"id": joining, "weight": 0.0, "reasons": ["health SUSPICIOUS: joined"]})
    waiting = [{"id": name, "reason": why} for name, why in (awaited or {}).items()]
    return {"workers": workers, "awaited": waiting, "projector": {"position": position}}


class Watched:
    """A start, and what the controller says of it."""

    def __init__(
        self,
        *names: str,
        timeout_s: float = 1000.0,
        patient: bool = True,
        times: ReadinessTimes = USUAL,
    ) -> None:
        self.says: Mapping[str, Any] | None = None
        self.watch = ReadinessWatch(self.ask, names, timeout_s, patient=patient, times=times)

    async def ask(self) -> Mapping[str, Any] | None:
        return self.says

    async def look(self) -> None:
        await self.watch.look()
        self.watch.tell()


def test_a_line_for_each_reason_names_three_and_counts_the_rest() -> None:
    names = [f"w{n}" for n in range(7)]
    said = status("w6", joining="w0", awaited=dict.fromkeys(names[1:5], AWAY))
    missing = absent(names, said, outside=False)
    assert list(lines(missing)) == [
        "w0 is awaited: health SUSPICIOUS: joined",
        f"w1, w2, w3 and 1 more are awaited: {AWAY}",
        "w5 is awaited: its process has not been heard of yet",
    ]
    assert list(absent(names, said, outside=True)) == names[1:5]


def test_a_spare_that_is_well_is_there_and_one_that_is_not_is_awaited() -> None:
    said = status("w0")
    for name, reasons in (("s0", ["spare"]), ("s1", ["health SUSPICIOUS: joined", "spare"])):
        said["workers"].append({"id": name, "weight": 0.0, "spare": True, "reasons": reasons})
    assert absent(["w0", "s0", "s1"], said, outside=False) == {"s1": "health SUSPICIOUS: joined"}


async def test_a_fleet_is_ready_with_those_that_are_there_and_awaits_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    it = Watched("w0", "w1")
    it.says = status("w0", awaited={"w1": AWAY})
    assert await it.watch.serves()
    assert it.watch.there == "1 of 2 workers"
    for _ in range(2):
        await it.look()
    it.says = status("w0", "w1")
    await it.look()
    await it.look()
    it.says = status("w0", joining="w1")
    await it.look()
    it.says = status("w0", awaited={"w1": "another"})
    await it.look()
    assert capsys.readouterr().out.splitlines() == [
        *[f"w1 is awaited: {AWAY}"] * 2,
        "nobody is awaited any longer: 2 workers",
        "w1 is awaited: another",
    ], "what the fleet deals with itself is not said once all were there"


async def test_who_never_comes_is_said_again_only_when_the_reason_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    it = Watched("w0", "w1", timeout_s=-1.0)
    assert it.watch.late
    for why in (AWAY, AWAY, "it is loading"):
        it.says = status("w0", awaited={"w1": why})
        await it.look()
    assert capsys.readouterr().out.splitlines() == [
        f"w1 is awaited: {AWAY}",
        "w1 is awaited: it is loading",
    ]


async def test_what_is_said_when_it_took_too_long() -> None:
    it = Watched("w0", "w1")
    assert await it.watch.verdict() == "w0, w1 are awaited: the controller cannot be asked yet"
    it.says = status(joining="w0", awaited={"w1": AWAY})
    said = await it.watch.verdict()
    assert said == f"w0 is awaited: health SUSPICIOUS: joined; w1 is awaited: {AWAY}"
    it.says = status("w0", "w1")
    assert await it.watch.verdict() == "a worker is there, and no frontend reaches it"


async def test_a_fleet_is_ready_when_its_operator_is_answered() -> None:
    it = Watched("w0", patient=False)
    assert not await it.watch.serves(), "nobody answers"
    it.says = status(position=None)
    assert not await it.watch.serves(), "it could not say how far the projector is"
    it = Watched("w0", patient=False, times=ReadinessTimes(status_s=-1.0))
    assert await it.watch.serves(), "but it serves, and is not held up for ever"
    assert it.watch.there == "1 worker"


async def test_a_telling_that_has_failed_ends_its_supervisor() -> None:
    it = Watched("w0", times=ReadinessTimes(say_every_s=0.0))
    it.says = {}  # a mistake of ours
    it.watch.begin()
    it.watch.check()
    with pytest.raises(KeyError):
        async with asyncio.timeout(20):
            while True:
                await asyncio.sleep(0)
                it.watch.check()
    await it.watch.end()
