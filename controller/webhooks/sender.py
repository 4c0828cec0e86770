"""Posts one webhook request. Redirects are not followed, and only the beginning of a response is read."""

import asyncio
import contextlib
import socket
import ssl
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import version
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from controller.adapters.scaling.one_line import one_line
from controller.ports import Clock
from controller.webhooks.retry_policy import Answer, retry_after_s
from controller.webhooks.settings import LinkLocalRefused, refusal
from controller.webhooks.templates import WebhookRequest
from events.errors import os_reason

BODY_MAX = 4_096  # bytes of a response body that are read
KEPT_S = 3.0  # time for which idle connections are kept, shorter than servers keep them
SAYS_S = 1.0  # time limit for reading the body after the status


@dataclass(frozen=True, slots=True)
class WebhookSender:
    """Posts webhook requests over one HTTP client session."""

    session: aiohttp.ClientSession
    clock: Clock
    timeout_s: float
    _: KW_ONLY
    allow_link_local: bool = False

    @classmethod
    async def open(cls, clock: Clock, timeout_s: float, *, allow_link_local: bool = False) -> "WebhookSender":
        """Open the HTTP client session, and return the sender.

        The sender creates a TLS context for its session, because the one that aiohttp creates at import may lack trusted
        certificates. Unless `allow_link_local` is set, the sender rejects link-local addresses and the addresses of clouds'
        metadata services.
        """
        resolver: AbstractResolver = aiohttp.DefaultResolver()
        trust: ssl.SSLContext = await asyncio.to_thread(ssl.create_default_context)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=trust,
                keepalive_timeout=KEPT_S,
                resolver=resolver if allow_link_local else GuardedResolver(resolver),
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # the timeout in `send` covers the whole request
            auto_decompress=False,
            trust_env=True,  # HTTPS_PROXY
        )
        return cls(session, clock, timeout_s, allow_link_local=allow_link_local)

    async def send(self, url: str, request: WebhookRequest) -> Answer:
        """Post a request once, and return the response. Errors and timeouts are returned as an Answer without a status."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._posted(url, request)
        except TimeoutError:
            return Answer(None, f"no answer within {self.timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Answer(None, one_line(f"cannot be reached: {_reason(error)}"))
        try:
            wait_s = retry_after_s(answer.headers, self.clock.now())
            return Answer(answer.status, one_line(await _beginning(answer)), wait_s)
        finally:
            answer.close()

    async def _posted(self, url: str, request: WebhookRequest) -> aiohttp.ClientResponse:
        why = "" if self.allow_link_local else refusal(urlsplit(url).hostname or "")
        if why:  # aiohttp does not pass literal addresses to the resolver, so they are checked here
            raise LinkLocalRefused(why)
        own = {"User-Agent": f"Holdfast/{version('holdfast')}", "Accept-Encoding": "identity"}
        headers = {**own, **request.headers}
        return await self.session.post(url, data=request.body, headers=headers, allow_redirects=False)

    async def close(self) -> None:
        """Close the session."""
        await self.session.close()


class GuardedResolver(AbstractResolver):
    """Resolves host names, and rejects those with a link-local address or an address of a metadata service.

    Every resolution is checked, because the name in a webhook's URL may later resolve to another address.
    """

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host name. Raise LinkLocalRefused if any of them is forbidden."""
        found = await self._resolver.resolve(host, port, family)
        for one in found:
            if why := refusal(one["host"]):
                raise LinkLocalRefused(f"{host}: {why}")
        return found

    async def close(self) -> None:
        """Close the resolver."""
        await self._resolver.close()


async def _beginning(answer: aiohttp.ClientResponse) -> str:
    """Return the beginning of a response body.

    Return "" if the body cannot be read. This is no error, because the status alone determines what to do."""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(SAYS_S):
            return (await answer.content.read(BODY_MAX)).decode(errors="replace")
    return ""


def _reason(error: Exception) -> str:
    """Return why a request got no response.

    For TLS errors, this is the error's own text, because the errno of such errors does not indicate the cause."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(
        error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError
    ):
        return os_reason(error.os_error)
    return str(error) or type(error).__name__
