"""Why does an upstream not serve us, in one sentence? Without its own words: they may quote a prompt, or our key."""

import os
from dataclasses import dataclass

import aiohttp
from yarl import URL

from events.errors import HoldfastError

UNAUTHORIZED = (401, 403)
LOADING = 503  # what servers answer before they are ready (llama-server, SGLang)


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """The result of one health check: a reason why it failed, or nothing."""

    trouble: str = ""
    timed_out: bool = False  # nothing was answered in time


class UpstreamAway(HoldfastError):
    """The upstream server cannot be reached, or does not answer as an OpenAI-compatible server does."""

    def __init__(self, why: str, said: str = "") -> None:
        """`said`: what the server says of it, which only who looks at it himself is told."""
        super().__init__(f"{why}: {said}" if said else why)
        self.why = why


def shown(url: str) -> str:
    """Return a server's URL without the name and the password that it may hold."""
    try:
        return str(URL(url).with_user(None))
    except ValueError:  # a port that is no number: who connects will say so
        return url.rpartition("@")[2]


def unreachable(url: str, path: str, error: Exception, within_s: float) -> UpstreamAway:
    """Return what is said of a server that did not answer."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamAway(f"cannot connect to {shown(url)} (it does not answer)")
    if isinstance(error, TimeoutError):
        return UpstreamAway(f"{shown(url)}{path} does not answer within {within_s:g} s")
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return UpstreamAway(f"cannot connect to {shown(url)}: {_tls_reason(error)}")
    if isinstance(error, aiohttp.ClientConnectorError):
        number, words = error.os_error.errno or 0, error.os_error.strerror
        why = os.strerror(number) if number > 0 else words or type(error.os_error).__name__
        return UpstreamAway(f"cannot connect to {shown(url)} ({why})")
    return UpstreamAway(f"{shown(url)}{path}: {type(error).__name__}", str(error))


def _tls_reason(error: aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError) -> str:
    """Say what is wrong with TLS: such an error has the number of another one ("Operation not permitted")."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause: object = error.certificate_error
        why = getattr(cause, "verify_message", "") or str(cause)
        return f"its certificate is not trusted: {why} (SSL_CERT_FILE names certificates to trust)"
    cause = error.os_error
    return f"TLS failed: {getattr(cause, 'reason', None) or cause}"


def refused(url: str, path: str, status: int, said: str, *, keyed: bool) -> UpstreamAway:
    """Return what is said of a server that answered with an error. `keyed`: it was given an API key."""
    answers = f"{shown(url)}{path} answers {status}"
    if status in UNAUTHORIZED:
        why = "it does not take the API key that it was given" if keyed else "it wants an API key"
        return UpstreamAway(f"{answers}: {why} (--upstream-key-file)")
    if status == LOADING:
        return UpstreamAway(f"{shown(url)} is loading, or has too much to do: {path} answers {status}", said)
    return UpstreamAway(answers, said)
