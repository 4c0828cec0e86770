"""Measures the accuracy of `holdfast replay what-if` against a second simulated run.

    python -m benchmarks what_if [--seeds 100] [--of QUESTION …]

A simulated fleet of eight workers breaks as a seed says: two engines raise, one answers wrongly in hardware, one hangs; each
recovers after a while. It is simulated twice, under two policies. What-if predicts from the first journal the outcome under the
second policy, and is compared with the second run: when each fault was noticed, when no request went there any more, and
when it was over. From the first decision that differs, the second run draws new times for canaries. Prints one
JSON object per question: the number of figures, the share of them within the predicted range (widened by a canary's jitter and
one interval between looks at the clock, which cannot be known), and the error of the likely value, in seconds: median and 90th
percentile; `change_s`: the same for a prediction that nothing changes.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from controller.deciders.fleet import Fleet
from controller.replay.whatif.comparison import INFINITY, MEASURES, PLACES
from controller.replay.whatif.course import take
from controller.replay.whatif.faults import FaultSeen, fared
from controller.replay.whatif.question import PolicyChange
from controller.replay.whatif.reading import in_one
from controller.replay.whatif.recording import Recording, recorded
from controller.replay.whatif.weights import Weights
from controller.simulator.simulation import Simulation, quiet, uncollected
from controller.simulator.world.kernel import MINUTE, MS, SECOND, Kernel
from controller.simulator.world.machines import CANARIES, Machine
from controller.simulator.world.scenario import Scenario, draw
from events.fact import Recorded

WORKERS, MINUTES = 8, 15.0
INTERVAL_S, SILENCE_S = 10.0, 3.0
LOOK_S = 2.0  # until a controller of the simulation looks at the clock, in each of two runs
USUAL = {"breaker.wait_min": 15.0}
QUESTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "canary every 3 s": {"canary.interval": 3.0},
    "canary every 30 s": {"canary.interval": 30.0},
    "one failure": {"health.failures_max": 1, "breaker.failures_max": 1},
    "five failures": {"health.failures_max": 5, "breaker.failures_max": 5},
    "wait 5 s": {"breaker.wait_min": 5.0},
    "wait 40 s": {"breaker.wait_min": 40.0},
    "silent after 2 s": {"liveness.silent_after": 2.0},
    "silent after 10 s": {"liveness.silent_after": 10.0},
}


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A planted fault. Seconds since the start."""

    kind: str
    worker: str
    at: float
    lasts: float
    canaries: frozenset[int]  # canaries that are answered wrongly, if any


def planted(seed: int, workers: Sequence[str]) -> list[PlantedFault]:
    """Return the faults of a seed, each of another worker."""
    dice = random.Random(seed)
    victims = dice.sample(list(workers), 4)
    found = []
    for kind, worker in zip(("error", "corrupt", "hang", "error"), victims, strict=True):
        wrong = frozenset(n for n in range(CANARIES) if dice.random() < 0.5)
        wrong = wrong or frozenset({dice.randrange(CANARIES)})
        found.append(PlantedFault(kind, worker, dice.uniform(60, 240), dice.uniform(20, 150), wrong))
    return found


def _plant(simulation: Simulation, fault: PlantedFault) -> None:
    kernel, machine = simulation.kernel, simulation.machines[fault.worker]
    starts, ends = int(fault.at * SECOND), int((fault.at + fault.lasts) * SECOND)
    match fault.kind:
        case "error":
            kernel.after(starts, _err, machine, True)
            kernel.after(ends, _err, machine, False)
        case "corrupt":
            kernel.after(starts, lambda: machine.corrupt(fault.canaries, in_hardware=True))
            kernel.after(ends, machine.heal_corruption)
        case _:
            kernel.after(starts, _hang, machine, True)
            kernel.after(starts + 500 * MS, simulation.stalled, machine)
            kernel.after(ends, _hang, machine, False)
            kernel.after(ends, lambda: machine.outbox.send())


def _err(machine: Machine, erring: bool) -> None:
    machine.condition.erring = erring


def _hang(machine: Machine, hung: bool) -> None:
    machine.condition.hung = hung


def scenario(seed: int, values: dict[str, Any]) -> Scenario:
    """Return a quiet fleet with these settings."""
    terms = PolicyChange({**USUAL, **values}).terms()
    interval, silence = terms.interval_s or INTERVAL_S, terms.silence_s or SILENCE_S
    return replace(
        draw(seed, WORKERS, MINUTES),
        policies=(terms.policy({}),), interval=int(interval * SECOND), tick=SECOND, skew=0, late=2 * SECOND,
        models=("llama",), controllers=2, frontends=2, requests_per_second=0.2, corrupt_from_start=0,
        faults={}, end_at=int(MINUTES * MINUTE), heal_at=int(MINUTES * MINUTE) - SECOND,
        spares=0, planning=None, crowd=None, silent_after_s=silence, settles=False,
    )  # fmt: skip


def played(seed: int, values: dict[str, Any]) -> tuple[list[PlantedFault], Recording]:
    """Simulate a seed with these settings, and return the faults and the journal."""
    simulation = Simulation(scenario(seed, values))
    faults = planted(seed, sorted(simulation.machines))
    with quiet(), uncollected():
        for fault in faults:
            _plant(simulation, fault)
        simulation.begin()
        simulation.kernel.run(simulation.scenario.end_at)

    async def events() -> AsyncIterator[Sequence[Recorded]]:
        yield simulation.broker.events

    found = asyncio.run(recorded(Fleet(), in_one(events())))
    assert found is not None
    return faults, found


@dataclass(frozen=True, slots=True)
class Prediction:
    """One figure: the predicted and the actual value. Seconds since the fault began; infinity: never."""

    seed: int
    fault: str
    measure: str
    low: float
    likely: float
    high: float
    was: float  # in the second run
    before: float  # in the first one

    def within(self, slack_s: float) -> bool:
        """Return whether the prediction was right, within `slack_s` seconds."""
        return self.low - slack_s <= self.was <= self.high + slack_s


def predictions(
    seed: int, values: dict[str, Any], of: tuple[list[PlantedFault], Recording] | None = None
) -> list[Prediction]:
    """Return all figures of a seed and a question. `of`: the result of the seed under the usual policy, if known."""
    faults, first = of or played(seed, {})
    _, second = played(seed, values)
    courses = [take(first, PolicyChange({**USUAL, **values}).terms(place)).weights for place in PLACES]
    found = []
    for fault in faults:
        told = [_times(fault, weights, first) for weights in courses]
        was, before = _times(fault, second.weights, second), _times(fault, first.weights, first)
        for measure in MEASURES:
            each = [one[measure] for one in told]
            found.append(
                Prediction(
                    seed,
                    fault.kind,
                    measure,
                    min(each),
                    each[len(each) // 2],
                    max(each),
                    was[measure],
                    before[measure],
                )
            )
    return found


def _times(fault: PlantedFault, weights: Weights, recording: Recording) -> dict[str, float]:
    at = Kernel(0).instant().timestamp() + fault.at
    over = at + fault.lasts
    asked = FaultSeen(
        fault.worker, fault.kind, (at, at), at, over, over, recording.end, fault.kind == "corrupt", True, ""
    )
    times = fared(asked, weights)
    return {name: INFINITY if (one := getattr(times, name)) is None else one - at for name in MEASURES}


def slack_s(values: dict[str, Any]) -> float:
    """Return by how much the canary times of two runs under the same policy may differ: jitter, and looks at the clock."""
    interval_s: float = max(INTERVAL_S, values.get("canary.interval", 0.0))
    return 0.2 * interval_s + 2 * LOOK_S


def summary(question: str, found: Sequence[Prediction]) -> dict[str, Any]:
    """Return the figures of one question."""
    slack = slack_s(QUESTIONS[question])
    errors = sorted(abs(one.likely - one.was) for one in found if max(one.likely, one.was) < INFINITY)
    changes = sorted(abs(one.before - one.was) for one in found if max(one.before, one.was) < INFINITY)
    return {
        "question": question,
        "figures": len(found),
        "within": round(sum(one.within(slack) for one in found) / len(found), 3),
        "slack_s": slack,
        "error_s_p50": round(errors[len(errors) // 2], 1),
        "error_s_p90": round(errors[int(len(errors) * 0.9)], 1),
        "change_s_p50": round(changes[len(changes) // 2], 1),
        "change_s_p90": round(changes[int(len(changes) * 0.9)], 1),
    }


def main() -> None:
    """Measure, and print."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--seeds", type=int, default=100)
    p.add_argument(
        "--of", nargs="*", choices=list(QUESTIONS), default=list(QUESTIONS), help="questions (default: all)"
    )
    a = p.parse_args()
    found: dict[str, list[Prediction]] = {question: [] for question in a.of}
    for seed in range(a.seeds):
        first = played(seed, {})
        for question in a.of:
            found[question] += predictions(seed, QUESTIONS[question], first)
    for question, figures in found.items():
        json.dump(summary(question, figures), sys.stdout)
        print()


if __name__ == "__main__":
    main()
