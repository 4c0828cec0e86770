"""What Alembic runs: the migrations, on the connection that `controller.adapters.postgres.migrate` hands over.

To write a new one: `alembic -c migrations/alembic.ini revision -m "what changes"`, then raise HEAD in
`controller/adapters/postgres/schema.py`.
"""

from alembic import context

connection = context.config.attributes.get("connection")
if connection is not None:
    context.configure(
        connection=connection,
        target_metadata=context.config.attributes.get("metadata"),
        version_table_schema=context.config.attributes["schema"],
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()
