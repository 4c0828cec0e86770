"""The embedded servers: a real nats-server and a real PostgreSQL, from wheels.

They are children of this process. They listen on 127.0.0.1 only, die with their parent, and keep their data in a directory that
a second start resumes. A lock that the server itself inherits keeps a second server off the directory, even after the first
one's parent is gone. Start them from the main thread (see `embedded.server.spawn`).
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
