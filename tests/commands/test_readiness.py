"""`holdfast up` reports missing workers, is ready with the first one, and gives up with a reason."""

from collections.abc import Mapping
from typing import Any

import pytest
from waits import until

from controller.processes.readiness_watch import ReadinessWatch, absent, lines

UNREACHABLE = "cannot connect to http://u"


def status(
    *there: str, awaited: Mapping[str, str] | None = None, joining: str = "", position: int | None = 7
) -> dict[str, Any]:
    workers = [{"id": name, "weight": 1.0, "reasons": []} for name in there]
    if joining:
        workers.append({"id": joining, "weight": 0.0, "reasons": ["health SUSPICIOUS: joined"]})
    waiting = [{"id": name, "reason": why} for name, why in (awaited or {}).items()]
    return {"workers": workers, "awaited": waiting, "projector": {"position": position}}


class Watched:
    """A start with a scripted status of the controller."""

    def __init__(self, *names: str, timeout_s: float = 1000.0, patient: bool = True) -> None:
        self.says: Mapping[str, Any] | None = None
        self.watch = ReadinessWatch(self.ask, names, timeout_s, patient=patient)

    async def ask(self) -> Mapping[str, Any] | None:
        return self.says

    async def look(self) -> None:
        await self.watch.look()
        self.watch.report()


def test_each_reason_is_one_line_that_names_three_workers_and_counts_the_rest() -> None:
    names = [f"w{n}" for n in range(7)]
    reported = status("w6", joining="w0", awaited=dict.fromkeys(names[1:5], UNREACHABLE))
    missing = absent(names, reported, outside=False)
    assert list(lines(missing)) == [
        "waiting for w0: health SUSPICIOUS: joined",
        f"waiting for w1, w2, w3 and 1 more: {UNREACHABLE}",
        "waiting for w5: its process has not reported yet",
    ]
    assert list(absent(names, reported, outside=True)) == names[1:5]


def test_a_healthy_spare_counts_as_ready_and_an_unhealthy_one_is_missing() -> None:
    reported = status("w0")
    for name, reasons in (("s0", ["spare"]), ("s1", ["health SUSPICIOUS: joined", "spare"])):
        reported["workers"].append({"id": name, "weight": 0.0, "spare": True, "reasons": reasons})
    assert absent(["w0", "s0", "s1"], reported, outside=False) == {"s1": "health SUSPICIOUS: joined"}


async def test_a_fleet_is_ready_with_its_first_worker_and_waits_for_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    it = Watched("w0", "w1")
    it.says = status("w0", awaited={"w1": UNREACHABLE})
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
        *[f"waiting for w1: {UNREACHABLE}"] * 2,
        "no longer waiting for any worker: 2 workers",
        "waiting for w1: another",
    ], "problems that the fleet handles itself are not reported once all workers have been ready"


async def test_a_worker_missing_after_the_timeout_is_reported_only_when_the_reason_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    it = Watched("w0", "w1", timeout_s=-1.0)
    assert it.watch.late
    for why in (UNREACHABLE, UNREACHABLE, "it is loading"):
        it.says = status("w0", awaited={"w1": why})
        await it.look()
    assert capsys.readouterr().out.splitlines() == [
        f"waiting for w1: {UNREACHABLE}",
        "waiting for w1: it is loading",
    ]


async def test_the_verdict_after_a_timeout_names_the_missing_workers() -> None:
    it = Watched("w0", "w1")
    assert await it.watch.verdict() == "waiting for w0, w1: the controller does not answer yet"
    it.says = status(joining="w0", awaited={"w1": UNREACHABLE})
    verdict = await it.watch.verdict()
    assert verdict == f"waiting for w0: health SUSPICIOUS: joined; waiting for w1: {UNREACHABLE}"
    it.says = status("w0", "w1")
    assert await it.watch.verdict() == "a worker is ready, but no frontend reaches it"


async def test_a_fleet_is_ready_when_its_controller_answers() -> None:
    it = Watched("w0", patient=False)
    assert not await it.watch.serves(), "no controller answers"
    it.says = status(position=None)
    assert not await it.watch.serves(), "the position of the projector is unknown"
    it = Watched("w0", patient=False)
    it.watch.status_s = -1.0
    assert await it.watch.serves(), "a serving fleet is ready after a while without an answer"
    assert it.watch.there == "1 worker"


async def test_an_error_in_the_reporting_reaches_the_supervisor() -> None:
    it = Watched("w0")
    it.watch.say_every_s = 0.0
    it.says = {}  # causes an internal error
    it.watch.begin()
    it.watch.check()
    with pytest.raises(KeyError):
        await until(it.watch.check)
    await it.watch.end()
