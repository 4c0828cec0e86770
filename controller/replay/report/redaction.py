"""Replaces the names of requests, workers, hosts and people in a report with pseudonyms.

The names are collected from the fleet state before the report's window and from all events in the window. A name has the same
pseudonym everywhere. Event kinds, states, times and numbers are not replaced, even if a worker is named like a kind or state.
"""

import re
from collections.abc import Iterable
from typing import Any

from controller.deciders.fleet import Fleet, Worker
from controller.read_model.worker_names import workers_of
from events.fact import Fact, Recorded
from events.observations import FrontendBreakersMoved, WorkerJoined

_WORD = re.compile(r"[A-Za-z0-9_\-]+(?:\.[A-Za-z0-9_\-]+)*")
_ADDRESS = re.compile(
    r"\b[a-z]+://[^\s\"']+|\bnats:[A-Za-z0-9_.\-]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]*:[0-9a-fA-F:]*\](?::\d+)?"
)
_PATH = re.compile(r"(?<![\w.])(?:/[\w.\-]+){2,}")
_PID = re.compile(r"\b(pid|process|uid) \d+")
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*")
_FIELDS = {
    "life": ("instance", "source_instance", "target_instance"),
    "request": ("request",),
    "frontend": ("frontend",),
    "observer": ("observer",),
    "host": ("host",),
    "device": ("device",),
    "person": ("by", "who"),
}
OURS = {  # generic names, which are not replaced because they identify nothing
    *("controller", "planner", "projector", "frontend", "supervisor", "operator", "reader", "worker", "workers"),
    *("configured", "cpu", "cuda", "simulated", "sim", "gpu", "canary", "user", ""),
}  # fmt: skip
AS_IT_IS = {  # fields that hold kinds or states, which are not replaced
    *("kind", "health", "state", "breaker", "before", "after", "phase", "method", "cause", "check_type", "golden", "fault"),
    *("position", "subject_kind", "outcome", "action", "tier", "mode", "engine", "id", "name", "event", "causation"),
}  # fmt: skip
GONE = ("pid", "url", "tokenizer")
NAMED = ("workers",)  # fields that are mappings with worker names as keys


class Redaction:
    """Maps each name in one report to its pseudonym, such as `worker-1`, and replaces names in text and JSON."""

    def __init__(self, fleet: Fleet, events: Iterable[Recorded]) -> None:
        """Collect the names in a fleet state and in events, and assign a pseudonym to each."""
        self._words: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        for worker in (*fleet.workers.values(), *fleet.departed.values()):
            self._know(worker)
        for one in fleet.incidents.values():
            self._name("worker", one.subject.partition("worker:")[2])
        for event in events:
            self._look(event.fact)
            for part in event.source.split(":")[1:]:
                self._name("process", part)
        odd = sorted((name for name in self._words if not _WORD.fullmatch(name)), key=len, reverse=True)
        self._odd = re.compile("|".join(map(re.escape, odd))) if odd else None

    def _know(self, worker: Worker) -> None:
        self._look(worker.joined)
        for device, _ in worker.health.limits:
            self._name("device", device)

    def _look(self, fact: Fact) -> None:
        for name in workers_of(fact):
            self._name("person" if name.startswith("operator ") else "worker", name)
        for kind, fields in _FIELDS.items():
            for field in fields:
                self._name(kind, getattr(fact, field, None))
        if isinstance(fact, FrontendBreakersMoved):
            for move in fact.moves:
                self._name("life", move.instance)
        if isinstance(fact, WorkerJoined):
            self._name("host", fact.topology.host)
            for gpu in fact.topology.gpus:
                self._name("device", gpu)

    def _name(self, kind: str, name: Any) -> None:
        if isinstance(name, str) and name not in OURS and name not in self._words:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._words[name] = f"{kind}-{number}"

    def text(self, value: str) -> str:
        """Return a text with its names, addresses, paths and process ids replaced."""
        if value in self._words:
            return self._words[value]
        value = _PID.sub(r"\1 (number)", _ADDRESS.sub("(address)", value))
        if self._odd is not None:
            value = self._odd.sub(lambda found: self._words[found[0]], value)
        return _WORD.sub(self._word, _PATH.sub("(path)", value))

    def _word(self, found: re.Match[str]) -> str:
        """Return the pseudonym of a matched word that is a name. In any other word, replace the parts that are names.

        Parts are separated by dots, for example in broker subjects. Parts that consist of digits are not replaced."""
        word = found[0]
        if word in self._words and not word.isdecimal():
            return self._words[word]
        return ".".join(part if part.isdecimal() else self._words.get(part, part) for part in word.split("."))

    def of(self, value: Any, field: str = "") -> Any:
        """Replace all names in a value of plain JSON types. `field` is the key under which the value is stored.

        Fields that identify a process or server, such as `pid` and `url`, become None."""
        if isinstance(value, str):
            return value if field in AS_IT_IS or _INSTANT.fullmatch(value) else self.text(value)
        if isinstance(value, dict):
            envelope = "body" in value  # the object is an event, and its field `source` names a process
            return {
                (self.text(key) if field in NAMED else key): None
                if key in GONE or (envelope and key == "source")
                else self.of(item, key)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.of(item, field) for item in value]
        return value
