"""Parses the state store's rows of workers, and tracks for how long each has been out of service."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from controller.planner.model_view import PlannedWorker
from events import codec
from events.observations import WorkerJoined

LEFT = "left: graceful"  # `reason` of a worker that will not return by itself


class WorkersSeen:
    """Records since when each worker has received no requests. The rows do not contain this time."""

    def __init__(self) -> None:
        """Start without any worker."""
        self._out_since: dict[str, float] = {}
        self._joined: dict[str, tuple[str, WorkerJoined]] = {}  # by worker: the text, and the parsed fact

    def by_model(self, rows: Sequence[Mapping[str, Any]], now: float) -> dict[str, list[PlannedWorker]]:
        """Return the workers of each model. `now`: seconds of a monotonic clock."""
        found: dict[str, list[PlannedWorker]] = defaultdict(list)
        names = {row["worker"] for row in rows}
        for known in (self._out_since, self._joined):
            for gone in known.keys() - names:
                del known[gone]
        for row in rows:
            worker = self._worker(row, now)
            found[worker.model].append(worker)
        return dict(found)

    def _worker(self, row: Mapping[str, Any], now: float) -> PlannedWorker:
        name, joined = row["worker"], self._read(row["worker"], row["joined"])
        leaving = bool(row["drain"]) or row["health"] == "DRAINING" or LEFT in row["reason"]
        if row["weight"] > 0:
            self._out_since.pop(name, None)
            out_s = 0.0
        else:
            out_s = now - self._out_since.setdefault(name, now)
        gpus = max(1, joined.tp) * max(1, joined.dp)
        kept = row["spare"]
        return PlannedWorker(name, row["model"], joined.profile, gpus, row["weight"], leaving, out_s, kept)

    def _read(self, worker: str, text: str) -> WorkerJoined:
        known = self._joined.get(worker)
        if known is None or known[0] != text:
            fact = codec.decode_body(WorkerJoined.kind(), text.encode())
            assert isinstance(fact, WorkerJoined)
            known = self._joined[worker] = (text, fact)
        return known[1]
