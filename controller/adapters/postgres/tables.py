"""The tables of the state store, which the projector writes, and router, planner and Grafana read.

All tables are in one schema, selected by `search_path`, so that `rebuild` can create a second schema and swap the two. The
migrations under `migrations/` create the tables, and a test compares the migrations with this module.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData()
_Kind = type[Text] | type[BigInteger]
_instant = DateTime(timezone=True)


def _key(name: str, kind: _Kind = Text) -> "Column[object]":
    return Column(name, kind, primary_key=True, autoincrement=False)


def _all(kind: _Kind, *names: str, nullable: bool = False) -> "list[Column[object]]":
    return [Column(name, kind, nullable=nullable) for name in names]


def _table(name: str, *parts: "Column[object] | Index") -> Table:
    return Table(name, metadata, *parts)


def _text(name: str) -> "Column[object]":
    return Column(name, Text, nullable=False)


workers = _table(
    "workers",
    _key("worker"),
    *_all(Text, "instance", "model", "revision", "url", "engine", "engine_version", "device", "canary_key"),
    Column("pid", BigInteger, nullable=False),
    _text("health"),
    Column("health_value", SmallInteger, nullable=False),  # 0 healthy … 4 dead
    Column(
        "weight", Double, nullable=False
    ),  # share of traffic: the minimum over all deciders; 0 when not routable
    Column("routable", Boolean, nullable=False),
    _text("reason"),
    _text("drain"),  # "" when not draining
    Column("drain_deadline", _instant),
    _text("incident"),
    Column("joined", JSONB, nullable=False),  # the whole registration: profile, topology, tokenizer …
    Column("last_canary", JSONB),
    Column("spare", Boolean, nullable=False),  # whether the worker is a spare, which gets no requests
    _text("place"),  # the worker that this spare replaces; "" if none
)

breakers = _table(
    "breakers",
    _key("worker"),
    *_all(Text, "instance", "position"),
    Column("position_value", SmallInteger, nullable=False),  # 0 closed, 1 open, 2 half-open
    Column("failures", Integer, nullable=False),  # consecutive failed requests
    Column("trials_failed", Integer, nullable=False),  # consecutive failed trials
    Column("retry_at", _instant),
    Column("deadline", _instant),
)

goldens = _table(
    "goldens",
    _key("canary_key"),
    _key("canary"),
    _text("status"),
    Column("agreed", Boolean, nullable=False),
    Column("golden", JSONB, nullable=False),
)

levels = _table(
    "levels",
    _key("model"),
    Column("level", SmallInteger, nullable=False),
    Column("ratio", Double),
    Column("capacity_rps", Double),
    Column("since", _instant),
    Column("knobs", JSONB, nullable=False),
)

incidents = _table(
    "incidents",
    _key("incident"),
    *_all(Text, "subject", "symptom"),
    Column("opened_at", _instant, nullable=False),
    Column("opened_by", BigInteger, nullable=False),  # the number of the decision
    Column("closed_at", _instant),
    Column("outcome", Text),
)

migrations = _table(
    "migrations",
    _key("id"),
    Column("seq", BigInteger, nullable=False),
    Column("at", _instant, nullable=False),
    *_all(
        Text,
        "frontend",
        "request",
        "model",
        "source",
        "source_instance",
        "target",
        "target_instance",
        "cause",
        "method",
    ),
    Column("tokens", BigInteger, nullable=False),
    Column("gap_ms", Double, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("exact", Boolean, nullable=False),
    Index("migrations_at", "at"),
)

exposures = _table(
    "exposures",
    _key("id"),
    Column("seq", BigInteger, nullable=False),
    Column("at", _instant, nullable=False),
    *_all(Text, "frontend", "worker", "instance"),
    Column("request", Text),  # null: unknown, so that `since` and `until` give the time span instead
    Column("model", Text),
    Column("first", BigInteger),
    Column("last", BigInteger),
    Column("finished", Boolean),
    _text("action"),
    Column("since", _instant),
    Column("until", _instant),
    Index("exposures_worker", "worker", "at"),
)

fleet_events = _table(
    "fleet_events",
    _key("seq", BigInteger),
    Column("at", _instant, nullable=False),
    _text("id"),  # ce-id
    *_all(Text, "kind", "source"),
    Column("source_number", BigInteger, nullable=False),
    Column("number", BigInteger),  # number of the decision; null for an observation
    Column(
        "through", BigInteger
    ),  # the position up to which the controller had read when it made the decision
    *_all(Text, "worker", "instance", "request", "model", "frontend", "incident", nullable=True),
    *_all(Text, "causation", "correlation"),
    Column("said_at", _instant),  # the source's own clock
    Column("body", JSONB, nullable=False),
    Index("fleet_events_id", "id", unique=True),
    Index("fleet_events_at", "at", postgresql_using="brin"),
    Index("fleet_events_kind", "kind", "seq"),
    Index("fleet_events_worker", "worker", "seq", postgresql_where=text("worker IS NOT NULL")),
    Index("fleet_events_incident", "incident", "seq", postgresql_where=text("incident IS NOT NULL")),
    Index("fleet_events_number", "number", postgresql_where=text("number IS NOT NULL")),
)

snapshots = _table(
    "snapshots",
    _key("reach", BigInteger),  # the last stream sequence that the settled fold contains
    Column("at", _instant, nullable=False),  # the stream's time of that event
    *_all(BigInteger, "through", "decided", "number"),
    Column("deciders_version", Integer, nullable=False),
    Column("codec_version", Integer, nullable=False),
    Column("fleet", LargeBinary, nullable=False),
    Column("sources", JSONB, nullable=False),
)

projection = _table(
    "projection",
    _key("name"),
    Column(
        "shown_seq", BigInteger, nullable=False
    ),  # the rows are the fold of all events up to this stream sequence
    _text("shown_id"),  # ce-id of the event at `shown_seq`; a recreated stream has another event there
    Column("shown_at", _instant),
    Column("through", BigInteger, nullable=False),  # the settled position
    *_all(BigInteger, "decided", "number"),
    Column("deciders_version", Integer, nullable=False),
    Column("written_at", _instant, nullable=False, server_default=text("clock_timestamp()")),
)

STATE = (
    workers,
    breakers,
    goldens,
    levels,
)  # tables of the fleet's present state; a row is written when it has changed
