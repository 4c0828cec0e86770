"""The route to an upstream: TLS, headers and a proxy; and why a TLS connection fails.

Upstreams with equal files share one context, because a context with the system's certificates takes half a megabyte. A changed
file is noticed within a second, so a renewed certificate needs no restart. If the new files cannot be used, the last good
context stays in use.
"""

import ssl
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypedDict

import aiohttp
import structlog
from msgspec.structs import replace

from workers.config.upstream_route import TLS_FILES, UpstreamRoute, UpstreamTls

LOOK_S = 1.0  # between two checks whether a file has changed
CONTEXTS_MAX = 64
CERTIFICATE_REQUIRED = (
    "CERTIFICATE_REQUIRED",
    "HANDSHAKE_FAILURE",
    "BAD_CERTIFICATE",
    "UNKNOWN_CA",
    "CERTIFICATE_UNKNOWN",
)
"""Parts of the alerts by which a server refuses a client that has no certificate, or one that the server does not trust."""

log = structlog.get_logger(__name__)


class TlsUnusable(aiohttp.ClientError):
    """A file of the TLS settings cannot be used, so no connection can be made."""


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of a request of aiohttp's client."""

    headers: dict[str, str]
    proxy: str
    ssl: ssl.SSLContext
    server_hostname: str


class RequestRoute:
    """Adds the settings of a route to each request to one server."""

    def __init__(self, url: str, settings: UpstreamRoute) -> None:
        """Route to the server at `url`, which contains no password."""
        self._url = url
        self._encrypted = url.startswith("https://")
        self.use(settings)

    def use(self, settings: UpstreamRoute) -> None:
        """Apply these settings to all later requests."""
        self._settings = settings
        self._tls = TlsContext(settings.tls)

    def options(self, headers: Mapping[str, str] | None = None) -> RequestOptions:
        """Return the keyword arguments for a request. `headers` are sent too, and replace equal ones of the settings.

        Raise TlsUnusable if the files of the TLS settings cannot be used.
        """
        settings, options = self._settings, RequestOptions()
        if settings.headers or headers:
            options["headers"] = {**settings.headers, **(headers or {})}
        if settings.proxy:
            options["proxy"] = settings.proxy
        if self._encrypted:
            options["ssl"] = self._tls.current()
            if settings.tls.server_name:
                options["server_hostname"] = settings.tls.server_name
        return options

    def tls_trouble(self, error: Exception) -> str:
        """Return why TLS to the server failed with `error`; "" if the error is not about TLS."""
        return tls_reason(error, self._url)


class _Stamp(NamedTuple):
    """What changes when a file is replaced."""

    path: str
    modified_ns: int
    inode: int
    size: int


class TlsContext:
    """The TLS context of one upstream."""

    def __init__(self, settings: UpstreamTls, look_s: float = LOOK_S) -> None:
        """Check at most every `look_s` seconds whether a file has changed."""
        self.settings = settings
        self._look_s = look_s
        self._context: ssl.SSLContext | None = None
        self._looked_at = float("-inf")
        self._trouble = ""

    def current(self) -> ssl.SSLContext:
        """Return the context by the present contents of the files.

        Raise TlsUnusable if the files cannot be used and never could be.
        """
        now = time.monotonic()
        if self._context is None or now - self._looked_at >= self._look_s:
            self._looked_at = now
            try:
                self._context = _context(replace(self.settings, server_name=""), _stamps(self.settings))
                self._trouble = ""
            except TlsUnusable as error:
                if self._context is None:
                    raise
                if str(error) != self._trouble:
                    log.warning(
                        "upstream_tls_unusable", reason=str(error), advice="the last good files stay in use"
                    )
                self._trouble = str(error)
        return self._context


def _stamps(settings: UpstreamTls) -> tuple[_Stamp, ...]:
    stamps = []
    for name in TLS_FILES:
        if path := getattr(settings, name):
            try:
                found = Path(path).stat()
            except OSError as error:
                raise TlsUnusable(f"{name} {path} cannot be read: {error.strerror}") from error
            stamps.append(_Stamp(path, found.st_mtime_ns, found.st_ino, found.st_size))
    return tuple(stamps)


@lru_cache(maxsize=CONTEXTS_MAX)
def _context(settings: UpstreamTls, stamps: tuple[_Stamp, ...]) -> ssl.SSLContext:
    """Return a context for these settings. `stamps` is only a part of the cache's key."""
    name = "ca_file"
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
        if not settings.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        name = "cert_file"
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file or None, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        path = getattr(settings, name)
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise TlsUnusable(f"{name} {path} cannot be used: {why}") from error
    return context


def _no_password() -> str:
    """Raise an error for an encrypted private key, for which OpenSSL would otherwise read a password from the terminal."""
    raise ValueError("the private key is encrypted; remove its passphrase")


def tls_reason(error: BaseException, url: str) -> str:
    """Return why a TLS connection to `url` failed; "" if the error is not about TLS.

    The number of such an error is misleading, because it means "Operation not permitted".
    """
    if isinstance(error, TlsUnusable):
        return str(error)
    if isinstance(error, aiohttp.ServerDisconnectedError) and url.startswith("https://"):
        # with TLS 1.3, a client learns only at its first read that the server refuses it
        return f"{url} closed the connection without an answer; if it requires a client certificate, set cert_file"
    cause = _ssl_error(error)
    if isinstance(cause, ssl.SSLCertVerificationError | ssl.CertificateError):
        why = str(getattr(cause, "verify_message", "") or cause).rstrip(".")
        setting = "server_name" if "mismatch" in why.lower() else "ca_file (or SSL_CERT_FILE)"
        return f"the certificate of {url} is not trusted: {why}; set {setting}"
    if cause is None:
        return ""
    reason = str(getattr(cause, "reason", None) or cause)
    if any(word in reason.upper() for word in CERTIFICATE_REQUIRED):
        return f"{url} refuses this client's certificate, or requires one ({reason}); set cert_file"
    return f"TLS with {url} failed: {reason}"


def _ssl_error(error: BaseException) -> ssl.SSLError | None:
    """Return the error of the TLS library behind an error of the HTTP client; None if there is none."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause: BaseException | None = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
    else:
        cause = error
    for _ in range(4):
        if isinstance(cause, ssl.SSLError) or cause is None:
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
