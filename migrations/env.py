"""Alembic's environment: runs migrations on the connection of `controller.adapters.postgres.migrate`.

No other connection is accepted. That module provides the lock, the deadline, the schema and the grants. `alembic upgrade` without
it would do nothing, or migrate the wrong schema, so it is refused.

To create a migration: `alembic -c migrations/alembic.ini revision -m "what changes"`, then raise HEAD in
`controller/adapters/postgres/link.py`.
"""

from alembic import context
from alembic.util import CommandError

connection = context.config.attributes.get("connection")
if connection is None:
    raise CommandError(
        "this command has no connection to a Holdfast database, so nothing was done: use `holdfast database migrate` or "
        "`holdfast database downgrade`, which connect to HOLDFAST_DATABASE_URL, lock the tables and set the grants"
    )
context.configure(
    connection=connection,
    version_table_schema=context.config.attributes["schema"],
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
