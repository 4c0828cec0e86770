"""The accounts of the embedded database, and the file with their passwords.

Only the file's owner can read the file. None of the accounts is a superuser. PostgreSQL's own superuser cannot log in to a
running server, because it has no password and no right to log in. `cluster.administer` runs statements as the superuser in a
server that accepts no connections.
"""

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.read_model.grants import OWNER, READER, WRITER
from events.process.key_file import write_private

ITERATIONS = 4096  # PostgreSQL's default, which suffices because 24 random bytes cannot be guessed
BYTES = 24  # random bytes of a password


@dataclass(frozen=True, slots=True)
class DatabaseUrls:
    """The URLs of one database, one for each account."""

    owner: str = ""  # for migrations and rebuilds
    writer: str = ""  # for the projector
    reader: str = ""  # for frontends, controllers and operators

    @classmethod
    def all_as(cls, url: str) -> "DatabaseUrls":
        """Return the URLs of an external database that has a single account for all uses."""
        return cls(url, url, url)


@dataclass(frozen=True, slots=True)
class DatabaseAccounts:
    """The accounts of one embedded database, with their passwords."""

    passwords: Mapping[str, str]  # by account name

    @classmethod
    def kept(cls, path: Path) -> "DatabaseAccounts":
        """Read the accounts from the file `path`. If that fails, create new passwords and write them to the file.

        Raise OSError if the file cannot be written.
        """
        try:
            found = json.loads(path.read_text())
            passwords = {name: str(found[name]) for name in (OWNER, WRITER, READER)}
        except (OSError, ValueError, KeyError, TypeError):
            passwords = {name: secrets.token_urlsafe(BYTES) for name in (OWNER, WRITER, READER)}
            write_private(path, json.dumps(passwords, indent=1))
        return cls(passwords)

    def urls(self, place: str) -> DatabaseUrls:
        """Return the URLs of a database, given its URL without an account (`place`)."""
        scheme, _, rest = place.partition("://")
        owner, writer, reader = (
            f"{scheme}://{name}:{self.passwords[name]}@{rest}" for name in (OWNER, WRITER, READER)
        )
        return DatabaseUrls(owner, writer, reader)

    def verifiers(self) -> dict[str, str]:
        """Return the verifier of each account's password, by account name.

        The server stores the verifier (RFC 5803) and never receives the password itself.
        """
        return {name: verifier(password) for name, password in self.passwords.items()}


def verifier(password: str) -> str:
    """Return the SCRAM-SHA-256 verifier of an ASCII password, in the form that Postgres stores."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, ITERATIONS)
    client = hmac.digest(salted, b"Client Key", "sha256")
    stored, server = hashlib.sha256(client).digest(), hmac.digest(salted, b"Server Key", "sha256")
    words = [base64.b64encode(part).decode() for part in (salt, stored, server)]
    return f"SCRAM-SHA-256${ITERATIONS}:{words[0]}${words[1]}:{words[2]}"
