"""Exports the functions that start and control the embedded servers nats-server and PostgreSQL.

The servers are child processes of this process. They listen on 127.0.0.1 only, end when this process ends, and keep their data in
a directory from which a later start continues. Each server inherits a lock on its directory, so that a second server cannot use
the directory even if the first server outlives this process. Start servers from the main thread (see `embedded.server.spawn`).
"""

from controller.adapters.embedded.nats import Stuck, effective, nats_binary, reload_users, start_nats
from controller.adapters.embedded.postgres import postgres_install, start_postgres
from controller.adapters.embedded.server import EmbeddedServer, PortInUse, ServerDirectoryInUse, ServerFailed

__all__ = [
    "EmbeddedServer",
    "PortInUse",
    "ServerDirectoryInUse",
    "ServerFailed",
    "Stuck",
    "effective",
    "nats_binary",
    "postgres_install",
    "reload_users",
    "start_nats",
    "start_postgres",
]
