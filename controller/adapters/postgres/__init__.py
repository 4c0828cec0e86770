"""The state store in Postgres: tables, statements, migrations, audit rows."""
