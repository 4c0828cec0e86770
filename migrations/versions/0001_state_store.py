"""The state store: the fleet's rows, all events, snapshots of the fold, and the projection's position.

Revision: 0001, the first.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)
APPEND_ONLY = """
CREATE FUNCTION fleet_events_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'fleet_events is append-only: % is refused', TG_OP USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER fleet_events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON fleet_events
    FOR EACH STATEMENT EXECUTE FUNCTION fleet_events_append_only();
REVOKE UPDATE, DELETE, TRUNCATE ON fleet_events FROM PUBLIC, CURRENT_USER;
"""
VIEWS = """
CREATE VIEW fleet_now AS
    SELECT w.worker, w.instance, w.model, w.url, w.health, w.weight, w.routable, w.reason, w.drain,
           b.position AS breaker, b.retry_at, w.last_canary, w.joined
    FROM workers w LEFT JOIN breakers b USING (worker);
CREATE VIEW model_capacity AS
    SELECT model, count(*) AS workers, count(*) FILTER (WHERE routable) AS routable, sum(weight) AS weight,
           max(level) AS level, max(ratio) AS ratio
    FROM workers LEFT JOIN levels USING (model) GROUP BY model;
"""


def upgrade() -> None:
    _state()
    _history()
    _events()
    _fold()
    for statements in (APPEND_ONLY, VIEWS):
        for statement in _split(statements):
            op.execute(statement)


def _split(script: str) -> list[str]:
    """Split a script into statements: asyncpg prepares one at a time. A function's body ends with `$$`."""
    head, mark, tail = script.partition("END $$;")
    whole = [head + mark] if mark else []
    return whole + [s for s in (tail if mark else head).split(";") if s.strip()]


def downgrade() -> None:
    op.execute("DROP VIEW model_capacity")
    op.execute("DROP VIEW fleet_now")
    for table in ("projection", "snapshots", "fleet_events", "exposures", "migrations", "incidents"):
        op.drop_table(table)
    op.execute("DROP FUNCTION fleet_events_append_only()")
    for table in ("levels", "goldens", "breakers", "workers"):
        op.drop_table(table)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _key(name: str, kind: type[sa.Text] | type[sa.BigInteger] = sa.Text) -> sa.Column[object]:
    return sa.Column(name, kind, primary_key=True, autoincrement=False)


def _state() -> None:
    op.create_table(
        "workers",
        _key("worker"),
        *map(
            _text,
            ("instance", "model", "revision", "url", "engine", "engine_version", "device", "canary_key"),
        ),
        sa.Column("pid", sa.BigInteger, nullable=False),
        _text("health"),
        sa.Column("health_value", sa.SmallInteger, nullable=False),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("routable", sa.Boolean, nullable=False),
        _text("reason"),
        _text("drain"),
        sa.Column("drain_deadline", INSTANT),
        _text("incident"),
        sa.Column("joined", JSONB, nullable=False),
        sa.Column("last_canary", JSONB),
    )
    op.create_table(
        "breakers",
        _key("worker"),
        _text("instance"),
        _text("position"),
        sa.Column("position_value", sa.SmallInteger, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("trials_failed", sa.Integer, nullable=False),
        sa.Column("retry_at", INSTANT),
        sa.Column("deadline", INSTANT),
    )
    op.create_table(
        "goldens",
        _key("canary_key"),
        _key("canary"),
        _text("status"),
        sa.Column("agreed", sa.Boolean, nullable=False),
        sa.Column("golden", JSONB, nullable=False),
    )
    op.create_table(
        "levels",
        _key("model"),
        sa.Column("level", sa.SmallInteger, nullable=False),
        sa.Column("ratio", sa.Double),
        sa.Column("capacity_rps", sa.Double),
        sa.Column("since", INSTANT),
        sa.Column("knobs", JSONB, nullable=False),
    )


def _history() -> None:
    op.create_table(
        "incidents",
        _key("incident"),
        _text("subject"),
        _text("symptom"),
        sa.Column("opened_at", INSTANT, nullable=False),
        sa.Column("opened_by", sa.BigInteger, nullable=False),
        sa.Column("closed_at", INSTANT),
        sa.Column("outcome", sa.Text),
    )
    op.create_table(
        "migrations",
        _key("id"),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        *map(
            _text, ("frontend", "request", "model", "source", "source_instance", "target", "target_instance")
        ),
        *map(_text, ("cause", "method")),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("gap_ms", sa.Double, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("exact", sa.Boolean, nullable=False),
    )
    op.create_index("migrations_at", "migrations", ["at"])
    op.create_table(
        "exposures",
        _key("id"),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("at", INSTANT, nullable=False),
        *map(_text, ("frontend", "worker", "instance")),
        sa.Column("request", sa.Text),
        sa.Column("model", sa.Text),
        sa.Column("first", sa.BigInteger),
        sa.Column("last", sa.BigInteger),
        sa.Column("finished", sa.Boolean),
        _text("action"),
        sa.Column("since", INSTANT),
        sa.Column("until", INSTANT),
    )
    op.create_index("exposures_worker", "exposures", ["worker", "at"])


def _events() -> None:
    op.create_table(
        "fleet_events",
        _key("seq", sa.BigInteger),
        sa.Column("at", INSTANT, nullable=False),
        *map(_text, ("id", "kind", "source")),
        sa.Column("source_number", sa.BigInteger, nullable=False),
        sa.Column("number", sa.BigInteger),
        sa.Column("through", sa.BigInteger),
        *(
            sa.Column(name, sa.Text)
            for name in ("worker", "instance", "request", "model", "frontend", "incident")
        ),
        *map(_text, ("causation", "correlation")),
        sa.Column("said_at", INSTANT),
        sa.Column("body", JSONB, nullable=False),
    )
    op.create_index("fleet_events_id", "fleet_events", ["id"], unique=True)
    op.create_index("fleet_events_at", "fleet_events", ["at"], postgresql_using="brin")
    op.create_index("fleet_events_kind", "fleet_events", ["kind", "seq"])
    for name in ("worker", "incident"):
        where = sa.text(f"{name} IS NOT NULL")
        op.create_index(f"fleet_events_{name}", "fleet_events", [name, "seq"], postgresql_where=where)
    where = sa.text("number IS NOT NULL")
    op.create_index("fleet_events_number", "fleet_events", ["number"], postgresql_where=where)


def _fold() -> None:
    op.create_table(
        "snapshots",
        _key("reach", sa.BigInteger),
        sa.Column("at", INSTANT, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("through", "decided", "number")),
        sa.Column("deciders_version", sa.Integer, nullable=False),
        sa.Column("codec_version", sa.Integer, nullable=False),
        sa.Column("fleet", sa.LargeBinary, nullable=False),
        sa.Column("sources", JSONB, nullable=False),
    )
    op.create_table(
        "projection",
        _key("name"),
        sa.Column("shown_seq", sa.BigInteger, nullable=False),
        _text("shown_id"),
        sa.Column("shown_at", INSTANT),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("through", "decided", "number")),
        sa.Column("deciders_version", sa.Integer, nullable=False),
        sa.Column("written_at", INSTANT, nullable=False, server_default=sa.text("clock_timestamp()")),
    )
    op.execute("INSERT INTO projection VALUES ('fleet', 0, '', NULL, 0, 0, 0, 0)")
