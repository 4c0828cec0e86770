"""Derives the rows of the state store from a fleet and from events.

A row is a plain tuple of values, in the order of `COLUMNS` or `EVENT_COLUMNS`. The store that writes the rows, its in-memory
double and `replay verify` all use this module, so that they agree on the rows.
"""

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, TypeVar, cast

import msgspec

from controller.deciders.degradation import Degradation
from controller.deciders.fleet import Fleet, Worker
from controller.deciders.golden import Golden
from controller.deciders.worker import LastCanary
from controller.read_model.worker_names import workers_of
from events import codec
from events.decisions import IncidentClosed, IncidentOpened, Knobs
from events.fact import Decision, Fact, Recorded, Skipped
from events.observations import (
    ExposureUnknown,
    IntrusionRefused,
    RequestExposed,
    RequestMigrated,
    SnapshotKept,
    WorkerJoined,
)

Row = tuple[Any, ...]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

COLUMNS: dict[str, tuple[str, ...]] = {
    "workers": (
        "worker", "instance", "model", "revision", "url", "engine", "engine_version", "device", "canary_key", "pid",
        "health", "health_value", "weight", "routable", "reason", "drain", "drain_deadline", "incident", "joined",
        "last_canary", "spare", "place",
    ),
    "breakers": ("worker", "instance", "position", "position_value", "failures", "trials_failed", "retry_at", "deadline"),
    "goldens": ("canary_key", "canary", "status", "agreed", "golden"),
    "levels": ("model", "level", "ratio", "capacity_rps", "since", "knobs"),
    "incidents": ("incident", "subject", "symptom", "opened_at", "opened_by", "closed_at", "outcome"),
    "migrations": (
        "id", "seq", "at", "frontend", "request", "model", "source", "source_instance", "target", "target_instance",
        "cause", "method", "tokens", "gap_ms", "attempt", "exact",
    ),
    "exposures": (
        "id", "seq", "at", "frontend", "worker", "instance", "request", "model", "first", "last", "finished", "action",
        "since", "until",
    ),
}  # fmt: skip
# tables with the current state; a row of the others comes from an event
STATE = ("workers", "breakers", "goldens", "levels")
KEYS = {"goldens": 2}  # number of leading columns that form the key; 1 for all other tables
INCIDENT_KINDS = (IncidentOpened.kind(), IncidentClosed.kind())
COUNT_MAX = 2**31 - 1  # maximum of an integer column; larger reported counts are stored as this value
_POSITIONS = ("closed", "open", "half_open")
EVENT_COLUMNS = (
    "seq", "at", "id", "kind", "source", "source_number", "number", "through", "worker", "instance", "request",
    "model", "frontend", "incident", "causation", "correlation", "said_at", "body",
)  # fmt: skip
_PLACES = ("worker", "instance", "request", "model", "frontend")


def _places(kind: type[Fact]) -> tuple[str | None, ...]:
    fields = set(kind.__dataclass_fields__)
    if kind is RequestMigrated:  # a migration is listed under the worker that the request left
        return ("source", "source_instance", "request", "model", "frontend")
    return tuple(name if name in fields else None for name in _PLACES)


_PLACES_OF = {kind: _places(kind) for kind in codec.KINDS.values()}


def event_row(event: Recorded) -> Row:
    """Return the row of the table `fleet_events` for one event."""
    fact = event.fact
    places = [getattr(fact, name) if name else None for name in _PLACES_OF[type(fact)]]
    # older releases stored no worker, and not every intruder is a worker
    if isinstance(fact, IntrusionRefused):
        places = [place or None for place in places]
    number, through = (fact.number, event.through) if isinstance(fact, Decision) else (None, None)
    body = codec.encode_body(fact).decode()
    row = (
        event.seq, event.at, event.id, fact.kind(), event.source, event.source_number, number, through, *places,
        incident_of(event), event.causation, event.correlation, event.said_at, body,
    )  # fmt: skip
    return row if "\\u0000" not in body else storable(row)


def audited(fact: Fact) -> bool:
    """Return whether `fleet_events` has a row for a fact. Skipped messages and parts of snapshots have none."""
    return not isinstance(fact, Skipped | SnapshotKept)


def event_rows(events: Iterable[Recorded]) -> list[Row]:
    """Return the rows of the table `fleet_events` for events. Events that the table does not store are left out."""
    return [event_row(event) for event in events if audited(event.fact)]


def incident_of(event: Recorded) -> str | None:
    """Return the id of the incident to which an event belongs, or None if the event belongs to no incident."""
    own = event.fact.incident if isinstance(event.fact, Decision) else None
    return own or event.correlation or None


class EventFilter(TypedDict, total=False):
    """The conditions of `Archive.select`. A condition that is missing or None excludes no event."""

    after: int  # sequence number, which only later events have
    since: datetime | None
    worker: str | None
    incident: str | None
    request: str | None


def matches(event: Recorded, wanted: EventFilter) -> bool:
    """Return whether an event meets the conditions of a filter. The condition `after` is not checked.

    The Postgres store checks the same conditions in SQL (`adapters.postgres.reader`)."""
    since, worker = wanted.get("since"), wanted.get("worker")
    incident, request = wanted.get("incident"), wanted.get("request")
    return (
        audited(event.fact)
        and (since is None or event.at >= since)
        and (worker is None or concerns(event.fact, worker))
        and (incident is None or incident_of(event) == incident)
        and (request is None or getattr(event.fact, "request", None) == request)
    )


def concerns(fact: Fact, worker: str) -> bool:
    """Return whether a fact names a worker in a field, or opens or closes an incident of the worker."""
    return worker in workers_of(fact)


def worker_column(kind: type[Fact]) -> str | None:
    """Return the field of a kind of fact that fills the column `worker` of `fleet_events`.

    None means that the column is empty for this kind.
    """
    return _PLACES_OF[kind][0]


def storable(row: Row) -> Row:
    """Return a row with each NUL character replaced by U+FFFD, because Postgres stores no NUL in text or JSON."""
    return tuple(
        value.replace("\x00", "\ufffd").replace("\\u0000", "\\ufffd") if isinstance(value, str) else value
        for value in row
    )


def recorded(row: Sequence[Any]) -> Recorded:
    """Return the event of a row of `fleet_events`.

    The event has no trace context, because the table does not store it.
    """
    seq, at, id, kind, source, source_number, _number, through = row[:8]
    causation, correlation, said_at, body = row[14:]
    return Recorded(
        seq=seq,
        at=at,
        fact=codec.decode_body(kind, body.encode()),
        id=id,
        source=source,
        source_number=source_number,
        through=through or 0,
        correlation=correlation,
        causation=causation,
        said_at=said_at,
    )


_HISTORICAL = {RequestMigrated, RequestExposed, ExposureUnknown, IncidentOpened, IncidentClosed}


def migration_row(event: Recorded) -> Row:
    """Return the row of the table `migrations` for a RequestMigrated."""
    fact = event.fact
    assert isinstance(fact, RequestMigrated)
    return storable((
        event.id, event.seq, event.at, fact.frontend, fact.request, fact.model, fact.source, fact.source_instance,
        fact.target, fact.target_instance, fact.cause, fact.method, fact.tokens, fact.gap_ms,
        min(fact.attempt, COUNT_MAX), fact.exact,
    ))  # fmt: skip


def exposure_row(event: Recorded) -> Row:
    """Return the row of the table `exposures` for a RequestExposed or an ExposureUnknown."""
    fact = event.fact
    if isinstance(fact, RequestExposed):
        return storable((
            event.id, event.seq, event.at, fact.frontend, fact.worker, fact.instance, fact.request, fact.model,
            fact.first, fact.last, fact.finished, fact.action, None, None,
        ))  # fmt: skip
    assert isinstance(fact, ExposureUnknown)
    return storable((
        event.id, event.seq, event.at, fact.frontend, fact.worker, fact.instance, None, None, None, None, None,
        fact.why, fact.since, fact.until,
    ))  # fmt: skip


def state(fleet: Fleet) -> dict[str, list[Row]]:
    """Return the rows that describe a fleet's state, by table."""
    return {
        "workers": [worker_row(worker) for worker in fleet.workers.values()],
        "breakers": [breaker_row(worker) for worker in fleet.workers.values()],
        "goldens": [golden_row(golden) for golden in fleet.goldens.values()],
        "levels": [level_row(model) for model in fleet.models.values()],
    }


def changes(before: Fleet | None, after: Fleet) -> dict[str, list[Row]]:
    """Return the rows to write and the keys to delete, so that the stored rows change from `before` to `after`.

    Rows are listed under the name of their table, such as "workers", and keys under a name such as "delete workers". An object
    that both fleets share has not changed, so its row is not written. If `before` is None, all rows are written.
    """
    if before is None:
        return state(after)
    workers, gone = _difference(before.workers, after.workers)
    goldens, retired = _difference(before.goldens, after.goldens)
    models, dropped = _difference(before.models, after.models)
    return {
        "workers": [worker_row(worker) for worker in workers],
        "breakers": [
            breaker_row(worker)
            for worker in workers
            if (old := before.workers.get(worker.joined.worker)) is None or old.breaker is not worker.breaker
        ],
        "goldens": [golden_row(golden) for golden in goldens],
        "levels": [level_row(model) for model in models],
        "delete workers": [(key,) for key in gone],
        "delete breakers": [(key,) for key in gone],
        "delete goldens": list(retired),
        "delete levels": [(key,) for key in dropped],
    }


def _difference(before: Mapping[K, V], after: Mapping[K, V]) -> tuple[list[V], list[K]]:
    """Return the values of `after` that are new or changed, and the keys that only `before` has.

    A value has changed if it is not the same object as in `before`.
    """
    if before is after:
        return [], []
    changed = [value for key, value in after.items() if before.get(key) is not value]
    return changed, [key for key in before if key not in after]


_JSON = {
    table: {n: name for n, name in enumerate(names) if name in ("joined", "last_canary", "golden", "knobs")}
    for table, names in COLUMNS.items()
}
_READ = {
    "joined": msgspec.json.Decoder(WorkerJoined).decode,
    "last_canary": msgspec.json.Decoder(LastCanary).decode,
    "golden": msgspec.json.Decoder(Golden).decode,
    "knobs": msgspec.json.Decoder(Knobs).decode,
}


def comparable(table: str, row: Row) -> Row:
    """Return a normalized row, so that rows with the same meaning compare equal.

    Two rows can differ in the text of their JSON columns because Postgres does not keep that text. A row of an earlier release
    can also lack optional fields that were added later. The missing fields get their defaults here.
    """
    return tuple(
        _as_read(_JSON[table][n], value) if n in _JSON[table] and value is not None else value
        for n, value in enumerate(row)
    )


def _as_read(column: str, text: str) -> str:
    value = json.loads(text)
    try:
        read = codec.to_builtins(_READ[column](text))
    # this project did not write the value, which is kept so that the comparison shows it
    except msgspec.MsgspecError:
        read = None
    return json.dumps(read if _within(value, read) else value, sort_keys=True)


def _within(value: object, read: object) -> bool:
    """Return whether every part of the JSON value `value` is also in `read`.

    `read` is the result of decoding `value`, and can contain additional fields with their defaults.
    """
    if isinstance(value, dict) and isinstance(read, dict):
        return all(key in read and _within(item, read[key]) for key, item in value.items())
    if isinstance(value, list) and isinstance(read, list | tuple):
        return len(value) == len(read) and all(map(_within, value, read))
    return bool(value == read)


def as_json(table: str, row: Row) -> dict[str, object]:
    """Return a row of a table as a mapping from column names to plain JSON types."""
    return {
        name: json.loads(value)
        if n in _JSON[table] and value is not None
        else value.isoformat()
        if isinstance(value, datetime)
        else value
        for n, (name, value) in enumerate(zip(COLUMNS[table], row, strict=True))
    }


def worker_row(worker: Worker) -> Row:
    """Return a worker's row of the table `workers`."""
    joined, health, drain = worker.joined, worker.health, worker.drain
    canary = worker.last_canary
    return storable((
        joined.worker, joined.instance, joined.model, joined.revision, joined.url, joined.engine, joined.engine_version,
        joined.device, joined.canary_key, joined.pid, health.status.value, health.status.metric, worker.weight,
        worker.routable, "; ".join(worker.reasons), drain.reason if drain.active else "", drain.deadline,
        worker.incident, codec.encode_body(joined).decode(), codec.to_json(canary) if canary else None,
        worker.spare.kept, worker.spare.place,
    ))  # fmt: skip


def breaker_row(worker: Worker) -> Row:
    """Return the row of the table `breakers` for a worker's breaker."""
    breaker = worker.breaker
    failures = min(max(breaker.request_failures, breaker.canary_failures), COUNT_MAX)
    return (
        breaker.worker, breaker.instance, breaker.position, _POSITIONS.index(breaker.position),
        failures, breaker.trials_failed, breaker.retry_at, breaker.deadline,
    )  # fmt: skip


def read_golden(row: Mapping[str, Any]) -> Golden:
    """Return the golden from a row of the table `goldens`, as the database returns the row."""
    return cast(Golden, _READ["golden"](row["golden"]))


def golden_row(golden: Golden) -> Row:
    """Return a golden's row of the table `goldens`."""
    row = (golden.canary_key, golden.canary, golden.status, golden.status == "agreed", codec.to_json(golden))
    return storable(row)


def level_row(model: Degradation) -> Row:
    """Return the row of the table `levels` for a model's degradation level."""
    return (
        model.model,
        model.level,
        model.ratio,
        model.capacity_rps,
        model.since,
        codec.to_json(model.knobs),
    )


def history(events: Iterable[Recorded]) -> dict[str, list[Row]]:
    """Return the rows that follow from events alone, without the fleet's state.

    The keys name an operation and a table, such as "append migrations". A row of "close incidents" holds the id, closing time and
    outcome of an incident that was opened before these events.
    """
    migrations: list[Row] = []
    exposures: list[Row] = []
    opened: dict[str, Row] = {}
    closed: dict[str, Row] = {}
    for event in events:
        if type(event.fact) not in _HISTORICAL:
            continue
        match event.fact:
            case RequestMigrated():
                migrations.append(migration_row(event))
            case RequestExposed() | ExposureUnknown():
                exposures.append(exposure_row(event))
            case IncidentOpened() as fact:
                opened.setdefault(
                    fact.incident,
                    (fact.incident, fact.subject, fact.symptom, fact.decided_at, fact.number, None, None),
                )
            case IncidentClosed() as fact if row := opened.get(fact.incident):
                opened[fact.incident] = (*row[:5], fact.decided_at, fact.outcome)
            case IncidentClosed() as fact:
                closed[fact.incident] = (fact.incident, fact.decided_at, fact.outcome)
    return {
        "append migrations": migrations,
        "append exposures": exposures,
        "append incidents": [storable(row) for row in opened.values()],
        "close incidents": list(closed.values()),
    }
