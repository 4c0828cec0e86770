"""`holdfast restart --rolling` starts with workers that serve no requests and need no replacement."""

from typing import Any

import pytest

from controller.commands.operator_commands import NotRestarted, all_of, restart
from controller.processes.operator_client import Operator


class ScriptedOperator(Operator):
    """A scripted fleet with workers that return at once. Records the order of restarts."""

    def __init__(self, **healths: str) -> None:
        self.healths = healths
        self.held = False  # successors are of a new lineage
        self.lives = dict.fromkeys(healths, 1)
        self.asked: list[str] = []

    async def ask(self, verb: str, body: dict[str, Any], deadline_s: float = 1.0) -> dict[str, Any]:
        if verb == "restart":
            name = body["worker"]
            self.asked.append(name)
            self.healths[name] = "SUSPICIOUS" if self.held else "HEALTHY"
            self.lives[name] += 1
            return {"says": f"{name} shuts down"}
        return {"workers": [self._worker(name) for name in self.healths]}

    def _worker(self, name: str) -> dict[str, Any]:
        health, lingers = self.healths[name].partition(" ")[::2]
        spare = name.startswith("s")
        weight = 1.0 if health == "HEALTHY" and not spare else 0.0
        about = {"id": name, "instance": f"{name}-{self.lives[name]}", "pid": self.lives[name], "model": "m"}
        return {
            **about,
            "health": health,
            "weight": weight,
            "breaker": "closed",
            "held": self.held and self.lives[name] > 1,
            "lingers": bool(lingers),
            "spare": spare,
        }


async def test_workers_without_requests_are_first_and_ended_workers_are_skipped() -> None:
    operator = ScriptedOperator(w0="HEALTHY", w1="DEAD", w2="DEAD lingers", w3="UNHEALTHY", w4="HEALTHY")
    names = await all_of(operator)
    assert names == ["w2", "w3", "w0", "w4"]
    await restart(operator, names, 20)
    assert operator.asked == names


async def test_a_worker_of_a_new_lineage_counts_as_restarted_although_it_is_held_back() -> None:
    operator = ScriptedOperator(w0="HEALTHY", w1="HEALTHY")
    operator.held = True
    await restart(operator, ["w0", "w1"], 2)
    assert operator.asked == ["w0", "w1"]


async def test_a_spare_counts_as_restarted_when_it_is_healthy() -> None:
    operator = ScriptedOperator(w0="HEALTHY", w1="HEALTHY", s0="HEALTHY")
    names = await all_of(operator)
    await restart(operator, names, 20)
    assert operator.asked == ["s0", "w0", "w1"]


async def test_the_only_serving_worker_is_not_restarted_but_one_without_requests_is() -> None:
    operator = ScriptedOperator(w0="HEALTHY", w1="UNHEALTHY")
    with pytest.raises(
        NotRestarted, match="w0 cannot be spared: no other worker of its model serves requests"
    ):
        await restart(operator, ["w0"], 0.2)
    alone = ScriptedOperator(w0="DEAD lingers")
    await restart(alone, ["w0"], 20)
    assert (operator.asked, alone.asked) == ([], ["w0"])
