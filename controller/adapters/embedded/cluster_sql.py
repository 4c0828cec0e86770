"""The superuser's SQL statements that set up the embedded database.

`cluster.administer` runs them while no server runs. All statements are idempotent. They also convert a database of an older
release, in which a superuser without a password was the only account and owned all objects.
"""

from collections.abc import Iterator, Mapping

from controller.read_model.grants import (
    OWNER,
    READER,
    WRITER,
    WRITES,
    grant_of_table,
    grants_of_schema,
    limits,
    quoted,
)

SCHEMA = "holdfast"
EDITION = "holdfast accounts 1"  # change this when a statement changes, so that databases are set up again at their next start
# maximum connections of readers, below `CONNECTIONS_MAX`, so that the projector can always connect
READERS_MAX = 40
_ATTRIBUTES = "LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS"
_NO_SUPERUSER_LOGIN = """DO $$ DECLARE account name; BEGIN
    FOR account IN SELECT rolname FROM pg_roles WHERE rolsuper LOOP
        EXECUTE format('ALTER ROLE %I NOLOGIN PASSWORD NULL', account);
    END LOOP;
END $$"""
_MAKE_ACCOUNT = """DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{0}') THEN CREATE ROLE {0}; END IF;
END $$"""
_NO_LARGE_OBJECTS = """DO $$ DECLARE made text; BEGIN
    FOR made IN SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace
        AND proname IN ('lo_creat', 'lo_create', 'lo_from_bytea', 'lo_put', 'lo_truncate', 'lo_truncate64', 'lowrite') LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END LOOP;
END $$"""
_OWNED_BY_THE_OWNER = f"""DO $$ DECLARE what text; BEGIN
    FOR what IN SELECT format('SCHEMA %I', nspname) FROM pg_namespace WHERE nspname ~ '^{SCHEMA}(_next|_old)?$'
        UNION ALL SELECT format('%s %I.%I', CASE relkind WHEN 'v' THEN 'VIEW' WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END,
            nspname, relname) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
            WHERE nspname ~ '^{SCHEMA}(_next|_old)?$' AND relkind IN ('r', 'v', 'S')
        UNION ALL SELECT 'FUNCTION ' || p.oid::regprocedure FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace
            WHERE nspname ~ '^{SCHEMA}(_next|_old)?$' LOOP
        EXECUTE 'ALTER ' || what || ' OWNER TO {OWNER}';
    END LOOP;
END $$"""
# The owner could disable the trigger that keeps `fleet_events` append-only, by mistake or because the owner's password has
# leaked. Therefore an event trigger checks the result of each such statement: there must be a trigger of that name that fires
# before every update (16), deletion (8) and truncation (32).
_GUARD = """CREATE FUNCTION fleet_guard.keep_append_only() RETURNS event_trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog AS $guard$
DECLARE broken boolean; BEGIN
    IF TG_EVENT = 'sql_drop' THEN
        SELECT bool_or(object_type = 'trigger' AND address_names[3] = 'fleet_events_append_only') INTO broken
            FROM pg_event_trigger_dropped_objects();
    ELSE
        SELECT bool_or(NOT EXISTS (SELECT FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid WHERE t.tgrelid = c.oid
            AND t.tgname = 'fleet_events_append_only' AND p.proname = t.tgname AND t.tgenabled IN ('O', 'A')
            AND t.tgtype = 2 + 8 + 16 + 32 AND t.tgqual IS NULL)
            OR TG_TAG LIKE '% FUNCTION') INTO broken
        FROM pg_event_trigger_ddl_commands() d LEFT JOIN pg_trigger g ON g.oid = d.objid OR g.tgfoid = d.objid
            AND g.tgname = 'fleet_events_append_only'
        JOIN pg_class c ON c.oid IN (d.objid, g.tgrelid) AND c.relname = 'fleet_events';
    END IF;
    IF broken THEN
        RAISE EXCEPTION 'fleet_events is append-only: what keeps it so stays as it is' USING ERRCODE = 'insufficient_privilege';
    END IF;
END $guard$"""
_GUARDED = {
    "ddl_command_end": (
        "ALTER TABLE",
        "ALTER TRIGGER",
        "CREATE TRIGGER",
        "CREATE FUNCTION",
        "ALTER FUNCTION",
    ),
    "sql_drop": ("DROP TRIGGER", "DROP FUNCTION"),
}


def accounts(verifiers: Mapping[str, str]) -> Iterator[str]:
    """Yield the statements that create the accounts with their password verifiers, and forbid the superuser to log in."""
    for account, verifier in verifiers.items():
        yield _MAKE_ACCOUNT.format(account)
        most = READERS_MAX if account == READER else -1
        yield f"ALTER ROLE {account} {_ATTRIBUTES} CONNECTION LIMIT {most} PASSWORD '{verifier}'"
    yield from limits(READER)
    yield _NO_SUPERUSER_LOGIN
    for database in ("postgres", "template1"):
        yield f"REVOKE ALL ON DATABASE {database} FROM PUBLIC"


def connect_rights(database: str) -> Iterator[str]:
    """Yield the statements that allow only Holdfast's accounts to connect to a database."""
    yield f"REVOKE ALL ON DATABASE {quoted(database)} FROM PUBLIC"
    yield f"GRANT CONNECT, CREATE ON DATABASE {quoted(database)} TO {OWNER}"
    yield f"GRANT CONNECT ON DATABASE {quoted(database)} TO {WRITER}, {READER}"


def rights(database: str) -> Iterator[str]:
    """Yield the statements that grant the accounts their rights in a database, including those on existing tables.

    Tables can exist already if an older release has created them.
    """
    yield from connect_rights(database)
    yield "REVOKE ALL ON SCHEMA public FROM PUBLIC"
    yield _NO_LARGE_OBJECTS
    yield _OWNED_BY_THE_OWNER
    for account in (WRITER, READER):
        for grant in grants_of_schema(SCHEMA, account):
            yield _where(f"to_regnamespace('{SCHEMA}')", grant)
    for table in WRITES:
        yield _where(f"to_regclass('{SCHEMA}.{table}')", grant_of_table(SCHEMA, table, WRITER))
    yield "DROP SCHEMA IF EXISTS fleet_guard CASCADE"
    yield "CREATE SCHEMA fleet_guard"
    yield _GUARD
    for event, tags in _GUARDED.items():
        named = ", ".join(f"'{tag}'" for tag in tags)
        yield (
            f"CREATE EVENT TRIGGER holdfast_{event} ON {event} WHEN TAG IN ({named}) "
            "EXECUTE FUNCTION fleet_guard.keep_append_only()"
        )
    yield f"COMMENT ON DATABASE {quoted(database)} IS '{EDITION}'"


def _where(there: str, statement: str) -> str:
    """Return SQL that runs `statement` only if the SQL expression `there` is not NULL, that is, if an object exists.

    Without this condition, a missing object would be an error, and any error ends the whole script.
    """
    return f"DO $$ BEGIN IF {there} IS NOT NULL THEN {statement}; END IF; END $$"
