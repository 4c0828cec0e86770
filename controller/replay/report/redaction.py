"""A report without names: who reads it learns what happened, and not to whom or where."""

import re
from collections.abc import Iterable
from typing import Any

from events.decisions import IncidentOpened
from events.fact import Recorded
from events.observations import WorkerJoined

_WORD = re.compile(r"[A-Za-z0-9_\-]+(?:\.[A-Za-z0-9_\-]+)*")
_URL = re.compile(r"\b[a-z]+://[^\s\"']+|\bnats:[A-Za-z0-9_.\-]+")
_PID = re.compile(r"\b(pid|process) \d+")
_FIELDS = {
    "worker": ("worker", "source", "target", "replaces", "returned", "proposed_by"),
    "life": ("instance", "source_instance", "target_instance"),
    "request": ("request",),
    "frontend": ("frontend",),
    "observer": ("observer",),
    "host": ("host",),
    "device": ("device",),
    "person": ("by", "who"),
}
OURS = ("controller", "planner", "configured", "cpu", "sim", "")  # names that are everybody's


class Redaction:
    """What is said in place of what."""

    def __init__(self, events: Iterable[Recorded]) -> None:
        """Find every name in these events."""
        self._words: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._odd: re.Pattern[str] | None = None
        for event in events:
            self._look(event)
        odd = sorted((name for name in self._words if not _WORD.fullmatch(name)), key=len, reverse=True)
        if odd:
            self._odd = re.compile("|".join(map(re.escape, odd)))

    def _look(self, event: Recorded) -> None:
        fact = event.fact
        for kind, fields in _FIELDS.items():
            for field in fields:
                value = getattr(fact, field, None)
                for name in value if isinstance(value, tuple) else (value,):
                    self._name(kind, name)
        for part in event.source.split(":")[1:]:
            self._name("process", part)
        if isinstance(fact, WorkerJoined):
            self._name("host", fact.topology.host)
            for gpu in fact.topology.gpus:
                self._name("device", gpu)
        if isinstance(fact, IncidentOpened):
            self._name("worker", fact.subject.partition("worker:")[2])

    def _name(self, kind: str, name: Any) -> None:
        if isinstance(name, str) and name not in OURS and name not in self._words:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._words[name] = f"{kind}-{number}"

    def text(self, said: str) -> str:
        """Return a text without names and addresses."""
        said = _PID.sub(r"\1 (number)", _URL.sub("(address)", said))
        if self._odd is not None:
            said = self._odd.sub(lambda found: self._words[found[0]], said)
        return _WORD.sub(lambda found: self._words.get(found[0], found[0]), said)

    def of(self, value: Any) -> Any:
        """Return plain JSON types without names and addresses; of numbers, processes' and ports' alone are left out."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {
                self.text(key): None if key in ("pid", "source") else self.of(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.of(item) for item in value]
        return value
