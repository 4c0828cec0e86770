"""The API keys and the TLS certificate of a frontend's ports, reloaded when their files change.

    Authorization: Bearer KEY ──▶ compared with every key of the file, in constant time ──▶ key's name, or 401 invalid_api_key

The file of API keys has one key per line, `key` or `name:key`. Blank lines and lines that begin with `#` are skipped.
Only digests of the keys stay in memory, and only a key's name is ever shown. A new certificate applies to new
connections; open connections are not closed.
"""

import hmac
import re
import socket
import ssl
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

import structlog

from controller.frontend.errors import ApiError
from controller.frontend.metrics import BoundMetrics
from controller.frontend.settings import FrontendSettings
from events.errors import BadSetting

KEYS_MAX = 1_000  # each key adds 0.2 µs to every request
KEY_CHARS_MIN = 8
FILE_BYTES_MAX = 2**20
NOT_PEM = "the certificate file contains no PEM certificate, or the key file no PEM private key"
_REASONS = {
    "KEY_VALUES_MISMATCH": "the private key does not belong to the certificate",
    "NO_START_LINE": NOT_PEM,
    "BAD_BASE64_DECODE": NOT_PEM,
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

log = structlog.get_logger(__name__)


class FileWatch:
    """Detects changes and replacements of files, by their inodes, sizes and modification times."""

    def __init__(self, *paths: Path | str) -> None:
        self._paths = [Path(path) for path in paths]
        self._seen = self._state()

    def changed(self) -> bool:
        """Return whether a file has changed since the last check.

        A missing file counts as unchanged, because it is probably being replaced.
        """
        now = self._state()
        if now is None or now == self._seen:
            return False
        self._seen = now
        return True

    def _state(self) -> list[tuple[int, ...]] | None:
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return None
        return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found]


class ApiKeys:
    """The API keys of one file, as digests with their names."""

    def __init__(self, path: Path | str, bounds: BoundMetrics | None = None) -> None:
        """Read the keys. `bounds` counts the requests without a valid key. Raise BadSetting if the file is invalid."""
        self._path, self._watch = Path(path), FileWatch(path)
        self._bounds = bounds
        try:
            self._digests = read_keys(self._path)
        except ValueError as error:
            raise BadSetting(f"the API key file {error}") from None

    def check(self, authorization: str) -> str:
        """Return the name of the key in an `Authorization` header. Raise ApiError (401) if the header has no valid key."""
        if name := self.named(authorization):
            return name
        if self._bounds is not None:
            self._bounds.count("api_key")
        why = "No API key provided: send Authorization: Bearer KEY."
        raise ApiError(401, "Incorrect API key provided." if authorization else why, code="invalid_api_key")

    def named(self, authorization: str) -> str:
        """Return the name of the key in an `Authorization` header, or an empty string if the header has no valid key."""
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        found = ""
        for name, known in self._digests:  # compare with all keys, so that timing does not reveal the match
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def refresh(self) -> None:
        """Reload the keys if the file has changed. If the new file is invalid, the old keys stay in use."""
        if not self._watch.changed():
            return
        try:
            self._digests = read_keys(self._path)
        except ValueError as error:
            log.error("api_keys_not_read", why=str(error))
        else:
            log.info("api_keys_read", names=[name for name, _ in self._digests])


def read_keys(path: Path) -> list[tuple[str, bytes]]:
    """Return the name and digest of each key in a file. Raise ValueError with the reason, which never quotes a line."""
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


class Tls:
    """The TLS context of both ports, with the certificate and private key from two files."""

    def __init__(self, certificate: Path | str, key: Path | str) -> None:
        """Read the certificate and the key. Raise BadSetting if TLS is not possible with these files."""
        self._certificate, self._key = certificate, key
        self._watch = FileWatch(certificate, key)
        try:
            self.context = _loaded(certificate, key)
        except (OSError, ValueError) as error:
            raise BadSetting(f"TLS with {certificate} and {key} is not possible: {_reason(error)}") from None

    def refresh(self) -> None:
        """Reload the certificate and key if a file has changed.

        If the files do not match, the old certificate stays in use.
        """
        if not self._watch.changed():
            return
        try:
            _loaded(self._certificate, self._key)
            self.context.load_cert_chain(self._certificate, self._key, _no_password)
        except (OSError, ValueError) as error:
            log.error("certificate_not_read", why=_reason(error))
        else:
            log.info("certificate_read", file=str(self._certificate))


def _loaded(certificate: Path | str, key: Path | str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key, _no_password)
    return context


def _no_password() -> str:
    """Raise ValueError, because the private key has a password.

    OpenSSL calls this function for the password. Without it, OpenSSL would prompt on the terminal.
    """
    raise ValueError("the private key has a password; provide one without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        # a file without PEM data yields no reason
        return _REASONS.get(error.reason or "", error.reason or NOT_PEM)
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def check_open_port(settings: FrontendSettings) -> None:
    """Raise BadSetting if clients on other hosts could use the API without a key, unless `--insecure` is given."""
    if settings.api_key_file or settings.insecure or is_loopback(settings.host):
        return
    raise BadSetting(
        f"the host {settings.host} lets clients of other hosts use the API without a key. Give --api-key-file FILE "
        "(docs/operations/security.md), listen on 127.0.0.1 behind a proxy that authenticates, or give --insecure"
    )


def is_loopback(host: str) -> bool:
    """Return whether a host, given as an address or a name, is reachable only from the local machine."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
