"""Copies the access rights on one schema's tables to those of another that replaces it."""

from controller.adapters.postgres.link import Connection
from controller.read_model.grants import quoted

_OF_TABLES = """SELECT relname AS name, privilege_type AS what, rolname AS account, is_grantable
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace, aclexplode(relacl) LEFT JOIN pg_roles r ON r.oid = grantee
    WHERE nspname = $1 AND relkind IN ('r', 'v') AND grantee <> relowner
        AND relname IN (SELECT relname FROM pg_class d JOIN pg_namespace m ON m.oid = d.relnamespace WHERE nspname = $2)"""
_OF_THE_SCHEMA = """SELECT '' AS name, privilege_type AS what, rolname AS account, is_grantable
    FROM pg_namespace n, aclexplode(nspacl) LEFT JOIN pg_roles r ON r.oid = grantee
    WHERE nspname = $1 AND grantee <> nspowner"""


async def copy(connection: Connection, schema: str, to: str) -> None:
    """Copy all grants on `schema` to `to`: a rebuild must not revoke grants that were made by hand."""
    found = [*await connection.fetch(_OF_THE_SCHEMA, schema), *await connection.fetch(_OF_TABLES, schema, to)]
    for row in found:
        what = f"{quoted(to)}.{quoted(row['name'])}" if row["name"] else f"SCHEMA {quoted(to)}"
        account = "PUBLIC" if row["account"] is None else quoted(row["account"])
        more = " WITH GRANT OPTION" if row["is_grantable"] else ""
        await connection.execute(f"GRANT {row['what']} ON {what} TO {account}{more}")
