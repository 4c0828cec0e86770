"""Describes in one sentence why an upstream is unavailable.

Never quotes the server's own text, which may contain a prompt or the API key.
"""

import os
from dataclasses import dataclass

import aiohttp
from yarl import URL

from events.errors import HoldfastError

UNAUTHORIZED = (401, 403)
LOADING = 503  # status of servers that are not ready yet (llama-server, SGLang)


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """The result of one health check: the reason why it failed, or empty."""

    trouble: str = ""
    timed_out: bool = False  # no answer came in time


class UpstreamUnavailable(HoldfastError):
    """The upstream server cannot be reached, or does not answer like an OpenAI-compatible server."""

    def __init__(self, why: str, said: str = "") -> None:
        """`said`: the server's own text. The message contains it; `why` does not."""
        super().__init__(f"{why}: {said}" if said else why)
        self.why = why


def shown(url: str) -> str:
    """Return a server's URL without a user name and password."""
    try:
        return str(URL(url).with_user(None))
    except ValueError:  # the port is not a number: the attempt to connect reports that
        return url.rpartition("@")[2]


def unreachable(url: str, path: str, error: Exception, within_s: float) -> UpstreamUnavailable:
    """Return the error for a server that did not answer."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamUnavailable(f"cannot connect to {shown(url)} (it does not answer)")
    if isinstance(error, TimeoutError):
        return UpstreamUnavailable(f"{shown(url)}{path} does not answer within {within_s:g} s")
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return UpstreamUnavailable(f"cannot connect to {shown(url)}: {_tls_reason(error)}")
    if isinstance(error, aiohttp.ClientConnectorError):
        number, words = error.os_error.errno or 0, error.os_error.strerror
        why = os.strerror(number) if number > 0 else words or type(error.os_error).__name__
        return UpstreamUnavailable(f"cannot connect to {shown(url)} ({why})")
    return UpstreamUnavailable(f"{shown(url)}{path}: {type(error).__name__}", str(error))


def _tls_reason(error: aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError) -> str:
    """Describe a TLS error. Its errno is misleading: it is that of "Operation not permitted"."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause: object = error.certificate_error
        why = getattr(cause, "verify_message", "") or str(cause)
        return f"its certificate is not trusted: {why} (SSL_CERT_FILE names certificates to trust)"
    cause = error.os_error
    return f"TLS failed: {getattr(cause, 'reason', None) or cause}"


def refused(url: str, path: str, status: int, said: str, *, keyed: bool) -> UpstreamUnavailable:
    """Return the error for a server that answered with an error status. `keyed`: an API key was sent."""
    answers = f"{shown(url)}{path} answers {status}"
    if status in UNAUTHORIZED:
        why = "it does not accept the API key" if keyed else "it requires an API key"
        return UpstreamUnavailable(f"{answers}: {why} (--upstream-key-file)")
    if status == LOADING:
        return UpstreamUnavailable(f"{shown(url)} is loading or overloaded: {path} answers {status}", said)
    return UpstreamUnavailable(answers, said)
