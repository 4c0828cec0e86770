"""Static API keys of the clients that may use a port.

    Authorization: Bearer KEY ──▶ compared with every key of the file, in constant time ──▶ its name, or 401 invalid_api_key

The file has one key per line, `key` or `name:key`; blank lines and lines that begin with `#` are skipped. It is reloaded when
it changes. Only digests stay in memory, and only a key's name is ever shown.
"""

import hmac
import re
from hashlib import sha256
from pathlib import Path

import structlog

from controller.frontend.errors import ApiError
from controller.frontend.http.file_watch import FileWatch
from controller.frontend.metrics import BoundMetrics
from events.errors import BadSetting

KEYS_MAX = 1_000  # each adds 0.2 µs to every request
KEY_CHARS_MIN = 8
FILE_BYTES_MAX = 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

log = structlog.get_logger(__name__)


class ApiKeys:
    """The API keys of one file."""

    def __init__(self, path: Path | str, bounds: BoundMetrics | None = None) -> None:
        """Read the keys. `bounds` counts the requests without a valid key. Raise BadSetting."""
        self._watch = FileWatch(path)
        self._bounds = bounds
        try:
            self._digests = read_keys(self._watch.path)
        except ValueError as error:
            raise BadSetting(f"the API key file {error}") from None

    def check(self, authorization: str) -> str:
        """Return the name of the key in an `Authorization` header. Raise ApiError (401)."""
        if name := self.named(authorization):
            return name
        if self._bounds is not None:
            self._bounds.count("api_key")
        why = "No API key provided: send Authorization: Bearer KEY."
        raise ApiError(401, "Incorrect API key provided." if authorization else why, code="invalid_api_key")

    def named(self, authorization: str) -> str:
        """Return the name of the key in an `Authorization` header; empty if the header has no valid key."""
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        found = ""
        for name, known in self._digests:  # compare with all keys, so that timing does not reveal the match
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def refresh(self) -> None:
        """Reload the file if it has changed. An invalid file is ignored."""
        if not self._watch.changed():
            return
        try:
            self._digests = read_keys(self._watch.path)
        except ValueError as error:
            log.error("api_keys_not_read", why=str(error))
        else:
            log.info("api_keys_read", names=[name for name, _ in self._digests])


def read_keys(path: Path) -> list[tuple[str, bytes]]:
    """Return each key's name and digest. Raise ValueError with the reason, which never quotes a line."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} has characters that are not ASCII") from None
    found: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        where = f"{path}, line {number}"
        name, colon, key = line.partition(":")
        name, key = (name.strip(), key.strip()) if colon else (f"key-{number}", line)
        if not _NAME.fullmatch(name):
            raise ValueError(f"{where}: a name has 1 to 64 letters, digits, dots, hyphens or underscores")
        if len(key) < KEY_CHARS_MIN or not key.isprintable() or " " in key:
            raise ValueError(f"{where}: a key has at least {KEY_CHARS_MIN} characters and no spaces")
        digest = _digest(key)
        if name in found or digest in found.values():
            raise ValueError(f"{where}: this name or key is given twice")
        found[name] = digest
    if not 1 <= len(found) <= KEYS_MAX:
        raise ValueError(f"{path} has {len(found)} keys: expected 1 to {KEYS_MAX}")
    return list(found.items())


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
