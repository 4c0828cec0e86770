"""Generates the SQL statements that grant database accounts their rights on the state store.

    account  used by                                    rights
    owner    migrations, `holdfast replay rebuild`      create and drop tables
    writer   the projector                              append events, update the rows of the read model
    reader   frontends, controllers, Grafana            read

No statement revokes a right. Revoking would be useless, because a superuser or the owner of the tables has every right anyway.
"""

from collections.abc import Iterator

from controller.read_model.rows import STATE

OWNER, WRITER, READER = "holdfast_owner", "holdfast_writer", "holdfast_reader"
READER_STATEMENT_S = 30  # default statement timeout of a reader's sessions in seconds
_APPENDED = ("fleet_events", "migrations", "exposures", "snapshots")
WRITES = {
    **dict.fromkeys(STATE, "INSERT, UPDATE, DELETE"),
    **dict.fromkeys(_APPENDED, "INSERT"),
    "incidents": "INSERT, UPDATE",
    "projection": "UPDATE",
}


def quoted(name: str) -> str:
    """Return a name quoted as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def grants(schema: str, *, writer: str = "", reader: str = "") -> Iterator[str]:
    """Yield the statements that grant a writer and a reader account their rights on the tables of a schema.

    An account named "" is left out."""
    for account in filter(None, (writer, reader)):
        yield from grants_of_schema(schema, account)
    for table in WRITES if writer else ():
        yield grant_of_table(schema, table, writer)


def grants_of_schema(schema: str, account: str) -> Iterator[str]:
    """Yield the statements that grant an account read access to all tables of a schema."""
    yield f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {quoted(account)}"
    yield f"GRANT SELECT ON ALL TABLES IN SCHEMA {quoted(schema)} TO {quoted(account)}"


def grant_of_table(schema: str, table: str, writer: str) -> str:
    """Return the statement that grants the writer account its rights on a table."""
    return f"GRANT {WRITES[table]} ON {quoted(schema)}.{table} TO {quoted(writer)}"


def limits(reader: str) -> Iterator[str]:
    """Yield the statements that set defaults of a reader's sessions: a statement timeout and read-only transactions.

    The timeout keeps a slow report from blocking a rebuild."""
    yield f"ALTER ROLE {quoted(reader)} SET statement_timeout = '{READER_STATEMENT_S}s'"
    yield f"ALTER ROLE {quoted(reader)} SET default_transaction_read_only = on"


def script(schema: str, *, owner: str, writer: str, reader: str) -> str:
    """Return the SQL script with which a superuser sets up an external database for Holdfast.

    The script creates the three accounts without passwords, the schema, and the accounts' rights."""
    lines = [
        "-- as a superuser, in the database that Holdfast is to use; then give each account its password"
    ]
    lines += [f"CREATE ROLE {quoted(account)} LOGIN;" for account in (owner, writer, reader)]
    lines += [f"{statement};" for statement in limits(reader)]
    lines += [f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)} AUTHORIZATION {quoted(owner)};"]
    lines += ["DO $$ BEGIN  -- a rebuild creates a second schema beside the first"]
    lines += [
        f"    EXECUTE format('GRANT CREATE, CONNECT ON DATABASE %I TO {quoted(owner)}', current_database());",
        f"    EXECUTE format('GRANT CONNECT ON DATABASE %I TO {quoted(writer)}, {quoted(reader)}', current_database());",
        "END $$;",
        "-- as the owner, after `holdfast database migrate` has created the tables, and again after an upgrade",
    ]
    lines += [f"{statement};" for statement in grants(schema, writer=writer, reader=reader)]
    return "\n".join(lines)
