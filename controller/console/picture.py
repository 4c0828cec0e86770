"""Computes the console's rows from the fleet state, the latest events and this frontend's streams.

A worker that has not changed is the same object in the next fleet state, and its row is reused. With a thousand workers, a
refresh therefore recomputes only about one row in thirty.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controller.console import rows
from controller.console.memory import HARM_OVER, FlowMemory
from controller.deciders.capacity import fleet_rps, slo_of
from controller.deciders.degradation import Degradation
from controller.deciders.fleet import Fleet, Worker
from controller.read_model.fleet_view import WELL, WorkerView, share_of
from controller.replay.recent import RecentEvent, RecentEvents, ServedRate
from controller.replay.sentences import count

CRITICAL_LEVEL = 3  # lowest degradation level that the headline shows as bad; lower levels are a warning


@dataclass(slots=True)
class FleetMoment:
    """The fleet state and the other inputs of one console snapshot, except the events."""

    fleet: Fleet
    seq: int  # sequence number of the last folded event
    now: datetime  # by the stream's clock
    # number of streams by worker, for the workers to which this frontend is connected
    streams: Mapping[str, int]
    fault: str = ""  # why the data may be outdated; empty: it is current


class FleetPicture:
    """Computes the sections of successive console snapshots. Each snapshot reuses the unchanged rows of the previous one."""

    def __init__(self, memory: FlowMemory) -> None:
        """Create a picture without rows. Its snapshots show the events in `memory`."""
        self._memory = memory
        self._recent = RecentEvents()
        self._workers: dict[str, tuple[Worker, WorkerView, rows.WorkerRow]] = {}
        self._rows: dict[str, rows.WorkerRow] = {}
        self._told: dict[int, tuple[RecentEvent, int, rows.EventRow]] = {}  # by sequence number
        # the fold's `workers` and `awaited` from which the rows were computed
        self._of: tuple[object, object] | None = None
        self._shares: dict[str, float] = {}  # by model; "" for the whole fleet

    def taken(self, moment: FleetMoment) -> rows.Sections:
        """Return the sections of the console snapshot for `moment`. Successive calls must be in order of time."""
        fleet = moment.fleet
        self._recent.take(self._memory.since(self._recent.last))
        self._recent.forget(moment.now)
        self._update_workers(fleet, moment.now)
        models, lanes = self._models(moment), self._memory.lanes
        return {
            "head": self._head(moment, models),
            "models": models,
            "workers": self._rows,
            "streams": {name: moment.streams.get(name, -1) for name in self._rows},
            "lanes": lanes.lanes(moment.now),
            "share": {"steps": lanes.share(moment.now)},
            "incidents": {one.id: rows.ended_incident(one) for one in self._memory.ended.values()}
            | {one.id: rows.open_incident(one) for one in fleet.incidents.values()},
            "events": self._events(),
        }

    def _update_workers(self, fleet: Fleet, now: datetime) -> None:
        """Update the workers' rows and the serving share of each model, if any worker in the fleet state has changed."""
        of = (fleet.workers, fleet.awaited)
        if self._of is not None and all(one is known for one, known in zip(of, self._of, strict=True)):
            return
        known, self._workers, lanes = self._workers, {}, self._memory.lanes
        for name, worker in fleet.workers.items():
            found = known.pop(name, None)
            if found is None or found[0] is not worker:
                shown = WorkerView.of(worker)
                found = (worker, shown, rows.worker_row(worker, shown))
                lanes.note(now, name, shown)
            self._workers[name] = found
        for name in known:
            lanes.note(now, name, None)
        self._rows = {name: row for name, (_, _, row) in self._workers.items()}
        for one in fleet.waiting:
            self._rows[one.worker] = rows.awaited_row(one, self._rows.get(one.worker))
        by_model: dict[str, list[WorkerView]] = defaultdict(list)
        for _, shown, _ in self._workers.values():
            by_model[shown.model].append(shown)
        self._shares = {model: share_of(some) for model, some in by_model.items()}
        self._shares[""] = share_of(shown for _, shown, _ in self._workers.values())
        self._of = of

    def _models(self, moment: FleetMoment) -> dict[str, rows.ModelRow]:
        fleet = moment.fleet
        by_model: dict[str, list[Worker]] = {model: [] for model in fleet.models}
        for worker in fleet.workers.values():
            by_model.setdefault(worker.joined.model, []).append(worker)
        model_of = {name: worker.joined.model for name, worker in fleet.workers.items()}
        rates = self._recent.rate_by_model(model_of)
        return {
            model: _model(
                moment, model, workers, self._shares.get(model, 0.0), rates.get(model, ServedRate())
            )
            for model, workers in sorted(by_model.items())
        }

    def _events(self) -> dict[str, rows.EventRow]:
        known, self._told = self._told, {}
        for told in self._recent.told:
            seq = told.event.seq
            found = known.get(seq)
            if found is None or found[:2] != (told, told.more):
                found = (told, told.more, rows.event_row(told))
            self._told[seq] = found
        return {str(seq): row for seq, (_, _, row) in self._told.items()}

    def _head(self, moment: FleetMoment, models: Mapping[str, rows.ModelRow]) -> dict[str, object]:
        rate, states = self._recent.rate(), Counter(row.state for row in self._rows.values())
        harm = self._memory.harm(moment.now)
        return {
            "headline": headline(moment, models, self._rows, harm),
            "states": dict(sorted(states.items())),
            "share": round(self._shares.get("", 0.0), 3),
            "streams": sum(moment.streams.values()),
            "answers": round(rate.answers, 1),
            "tokens": round(rate.tokens),
            "ttft_ms": -1 if rate.ttft_ms is None else round(rate.ttft_ms),
            "refused": round(rate.refused, 1),
            "moved": harm["moved"],
            "seq": moment.seq,
            "fault": moment.fault,
        }


def _model(
    moment: FleetMoment, model: str, workers: Sequence[Worker], share: float, rate: ServedRate
) -> rows.ModelRow:
    fleet = moment.fleet
    state = fleet.models.get(model, Degradation(model))
    slo = slo_of(fleet.policy, model)
    promised = slo.slo_throughput_rps or None
    carried = None
    if promised is not None:
        carrying = [(one.joined.profile, one.carries) for one in workers]
        carried = round(fleet_rps(model, carrying, slo, (state.knobs.latency,))[0], 2)
    return rows.ModelRow(
        serving=sum(one.routable for one in workers),
        workers=sum(one.alive and not one.spare.kept for one in workers),
        spares=sum(one.alive and one.spare.kept for one in workers),
        share=round(share, 3),
        level=state.level,
        given_up=rows.given_up(state),
        capacity_rps=carried,
        promised_rps=promised,
        answers=round(rate.answers, 1),
        tokens=round(rate.tokens),
        refused=round(rate.refused, 1),
        ttft_ms=None if rate.ttft_ms is None else round(rate.ttft_ms),
        streams=sum(moment.streams.get(one.joined.worker, 0) for one in workers),
    )


def headline(
    moment: FleetMoment,
    models: Mapping[str, rows.ModelRow],
    workers: Mapping[str, rows.WorkerRow],
    harm: Counter[str],
) -> rows.Headline:
    """Summarize user impact, capacity, unhealthy workers and open incidents in one line, with the severity of the worst part.

    `harm` counts the affected requests by kind, as `FlowMemory.harm` returns them."""
    levels: list[rows.Level] = ["ok"]
    parts = [_impact(harm, levels)]
    for model, row in models.items():
        if not row.serving:
            levels.append("bad")
            parts.append(f"no worker serves {model}")
        elif row.level:
            levels.append("bad" if row.level >= CRITICAL_LEVEL else "warn")
            parts.append(f"{model} is at degradation level {row.level}")
    troubled = sum(row.health not in ("HEALTHY", "DEAD") or bool(row.why) for row in workers.values())
    if not workers:
        levels.append("warn")
        parts.append("no worker has joined yet")
    elif troubled:
        levels.append("warn")
        verb = "is" if troubled == 1 else "are"
        parts.append(f"{troubled} of {count(len(workers), 'worker')} {verb} not at full weight")
    elif all(row.state in WELL for row in workers.values()):
        parts.append("all workers are healthy")
    if moment.fleet.incidents:
        levels.append("warn")
        open_ones = len(moment.fleet.incidents)
        parts.append(f"{count(open_ones, 'incident')} {'is' if open_ones == 1 else 'are'} open")
    if moment.fault:
        levels.append("bad")
        parts.insert(0, f"this view may be outdated ({moment.fault})")
    worst: rows.Level = max(levels, key=("ok", "warn", "bad").index)
    text = "; ".join(parts)
    return rows.Headline(worst, f"{text[0].upper()}{text[1:]}.")


def _impact(harm: Counter[str], levels: list[rows.Level]) -> str:
    minutes = f"{HARM_OVER.total_seconds() / 60:g}"
    found = []
    if harm["lost"]:
        found.append(f"{count(harm['lost'], 'answer')} lost")
    if harm["exposed"]:
        found.append(f"{count(harm['exposed'], 'answer')} with tokens of a convicted worker")
    if harm["refused"]:
        found.append(f"{count(harm['refused'], 'request')} rejected")
    if not found:
        return f"no user impact in the last {minutes} minutes"
    levels.append("bad" if harm["lost"] or harm["exposed"] else "warn")
    return f"in the last {minutes} minutes: {', '.join(found)}"
