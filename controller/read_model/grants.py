"""Who may do what in the state store: what the projector's account needs, and what a reader's, as SQL.

    owner    makes and drops the tables: migrations, `holdfast replay rebuild`
    writer   appends events, updates the rows of the read model: the projector
    reader   reads: frontends, controllers, Grafana

Nothing here removes a right: an account that is a superuser or owns the tables has every right anyway.
"""

from collections.abc import Iterator

from controller.read_model.rows import STATE

OWNER, WRITER, READER = "holdfast_owner", "holdfast_writer", "holdfast_reader"
READER_STATEMENT_S = 30  # how long a statement of a reader may take, unless its session asks for more
_APPENDED = ("fleet_events", "migrations", "exposures", "snapshots")
WRITES = {
    **dict.fromkeys(STATE, "INSERT, UPDATE, DELETE"),
    **dict.fromkeys(_APPENDED, "INSERT"),
    "incidents": "INSERT, UPDATE",
    "projection": "UPDATE",
}


def quoted(name: str) -> str:
    """Return a name as SQL reads it, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def grants(schema: str, *, writer: str = "", reader: str = "") -> Iterator[str]:
    """Yield the statements that give accounts their rights on the tables that a schema has; "" is nobody."""
    for account in filter(None, (writer, reader)):
        yield from grants_of_schema(schema, account)
    for table in WRITES if writer else ():
        yield grant_of_table(schema, table, writer)


def grants_of_schema(schema: str, account: str) -> Iterator[str]:
    """Yield the statements that let an account read everything."""
    yield f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {quoted(account)}"
    yield f"GRANT SELECT ON ALL TABLES IN SCHEMA {quoted(schema)} TO {quoted(account)}"


def grant_of_table(schema: str, table: str, writer: str) -> str:
    """Return the statement that lets the projector's account do to a table what it does."""
    return f"GRANT {WRITES[table]} ON {quoted(schema)}.{table} TO {quoted(writer)}"


def limits(reader: str) -> Iterator[str]:
    """Yield what a reader's sessions begin with: nobody's report may hold up a rebuild, or a mistake change a row."""
    yield f"ALTER ROLE {quoted(reader)} SET statement_timeout = '{READER_STATEMENT_S}s'"
    yield f"ALTER ROLE {quoted(reader)} SET default_transaction_read_only = on"


def script(schema: str, *, owner: str, writer: str, reader: str) -> str:
    """Return what the superuser of a database of one's own runs once: accounts without passwords, and their rights."""
    lines = [
        "-- as a superuser, in the database that Holdfast is to use; then give each account its password"
    ]
    lines += [f"CREATE ROLE {quoted(account)} LOGIN;" for account in (owner, writer, reader)]
    lines += [f"{statement};" for statement in limits(reader)]
    lines += [f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)} AUTHORIZATION {quoted(owner)};"]
    lines += ["DO $$ BEGIN  -- a rebuild makes a second schema beside the first"]
    lines += [
        f"    EXECUTE format('GRANT CREATE, CONNECT ON DATABASE %I TO {quoted(owner)}', current_database());",
        f"    EXECUTE format('GRANT CONNECT ON DATABASE %I TO {quoted(writer)}, {quoted(reader)}', current_database());",
        "END $$;",
        "-- as the owner, once `holdfast database migrate` has made the tables, and again after an upgrade",
    ]
    lines += [f"{statement};" for statement in grants(schema, writer=writer, reader=reader)]
    return "\n".join(lines)
