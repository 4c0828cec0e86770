"""TLS of a frontend's ports: one certificate, read again when its files change, without closing a connection."""

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
        """Read the files again if one has changed. New connections get the new certificate; files that do not match change
        nothing."""
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
    """Refuse a private key with a password: OpenSSL would ask for it on the terminal."""
    raise ValueError("the private key has a password; give one without")


NOT_PEM = "the certificate file has no certificate, or the key file no private key, in PEM form"
_REASONS = {
    "KEY_VALUES_MISMATCH": "the private key does not belong to the certificate",
    "NO_START_LINE": NOT_PEM,
    "BAD_BASE64_DECODE": NOT_PEM,
}


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return _REASONS.get(error.reason or "", error.reason or NOT_PEM)  # a file without PEM gives no reason
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
