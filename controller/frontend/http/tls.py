"""TLS of a frontend's ports: one certificate, reloaded without closing connections."""

import ssl
from pathlib import Path

import structlog

from controller.frontend.http.file_watch import FileWatch
from events.errors import BadSetting

log = structlog.get_logger(__name__)


class Tls:
    """The certificate and private key of both ports."""

    def __init__(self, certificate: Path | str, key: Path | str) -> None:
        """Read both files. Raise BadSetting."""
        self._files = FileWatch(certificate), FileWatch(key)
        try:
            self.context = _loaded(certificate, key)
        except (OSError, ValueError) as error:
            raise BadSetting(f"TLS with {certificate} and {key} is not possible: {_reason(error)}") from None

    def refresh(self) -> None:
        """Reload the files if one has changed. New connections use the new certificate; files that do not match are ignored."""
        first, second = self._files
        changed = first.changed(), second.changed()
        if not any(changed):
            return
        certificate, key = first.path, second.path
        try:
            _loaded(certificate, key)
            self.context.load_cert_chain(certificate, key, _no_password)
        except (OSError, ValueError) as error:
            log.error("certificate_not_read", why=_reason(error))
        else:
            log.info("certificate_read", file=str(certificate))


def _loaded(certificate: Path | str, key: Path | str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key, _no_password)
    return context


def _no_password() -> str:
    """Reject a private key with a password: OpenSSL would prompt for it on the terminal."""
    raise ValueError("the private key has a password; provide one without a password")


NOT_PEM = "the certificate file contains no PEM certificate, or the key file no PEM private key"
_REASONS = {
    "KEY_VALUES_MISMATCH": "the private key does not belong to the certificate",
    "NO_START_LINE": NOT_PEM,
    "BAD_BASE64_DECODE": NOT_PEM,
}


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        # a file without PEM data yields no reason
        return _REASONS.get(error.reason or "", error.reason or NOT_PEM)
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
