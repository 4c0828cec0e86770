"""The accounts of the embedded database, and the file with their passwords.

Only its owner can read the file. None of the accounts is a superuser. PostgreSQL's own superuser cannot connect: it has neither a
password nor the right to log in, and acts only in a server without connections (`cluster.administer`).
"""

import base64
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.read_model.grants import OWNER, READER, WRITER

ITERATIONS = 4096  # PostgreSQL's default; 24 random bytes cannot be guessed anyway
BYTES = 24


@dataclass(frozen=True, slots=True)
class DatabaseUrls:
    """The URLs of one database, one per kind of work."""

    owner: str = ""  # migrations and rebuilds
    writer: str = ""  # the projector
    reader: str = ""  # frontends, controllers, operators

    @classmethod
    def all_as(cls, url: str) -> "DatabaseUrls":
        """Return the URLs of an external database with a single account for everything."""
        return cls(url, url, url)


@dataclass(frozen=True, slots=True)
class DatabaseAccounts:
    """The passwords of the accounts."""

    passwords: Mapping[str, str]  # by account name

    @classmethod
    def kept(cls, path: Path) -> "DatabaseAccounts":
        """Return the accounts in a file, or create new ones and store them there. Raise OSError."""
        try:
            found = json.loads(path.read_text())
            passwords = {name: str(found[name]) for name in (OWNER, WRITER, READER)}
        except (OSError, ValueError, KeyError, TypeError):
            passwords = {name: secrets.token_urlsafe(BYTES) for name in (OWNER, WRITER, READER)}
            _write(path, json.dumps(passwords, indent=1))
        return cls(passwords)

    def urls(self, place: str) -> DatabaseUrls:
        """Return the URLs of the database at `place`, a URL without an account."""
        scheme, _, rest = place.partition("://")
        owner, writer, reader = (
            f"{scheme}://{name}:{self.passwords[name]}@{rest}" for name in (OWNER, WRITER, READER)
        )
        return DatabaseUrls(owner, writer, reader)

    def verifiers(self) -> dict[str, str]:
        """Return each account's verifier: the server stores it (RFC 5803) and never receives the password itself."""
        return {name: verifier(password) for name, password in self.passwords.items()}


def verifier(password: str) -> str:
    """Return the SCRAM-SHA-256 verifier of an ASCII password, as Postgres stores it."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, ITERATIONS)
    client = hmac.digest(salted, b"Client Key", "sha256")
    stored, server = hashlib.sha256(client).digest(), hmac.digest(salted, b"Server Key", "sha256")
    words = [base64.b64encode(part).decode() for part in (salt, stored, server)]
    return f"SCRAM-SHA-256${ITERATIONS}:{words[0]}${words[1]}:{words[2]}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
