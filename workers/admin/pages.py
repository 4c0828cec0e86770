"""A minimal HTTP server for the admin port: GET of a few pages, one request per connection.

A web framework would use a third of a worker's memory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from events.process.admin_guard import own_hosts, refusal
from events.process.exposition import LARGE_BYTES, packed
from workers.listen_socket import listening

REQUEST_BYTES_MAX = 16 * 1024
REQUEST_S_MAX = 5.0
CONNECTIONS_MAX = 64


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """The response of a page."""

    body: bytes
    type: str = "application/json; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK

    @property
    def large(self) -> bool:
        """Whether compressing the body is worth it."""
        return len(self.body) >= LARGE_BYTES


Page = Callable[[], PageAnswer | Awaitable[PageAnswer]]


class Pages:
    """Serves pages by their path."""

    def __init__(self, pages: Mapping[str, Page], request_s_max: float = REQUEST_S_MAX) -> None:
        """`request_s_max`: seconds for one request including its response."""
        self._request_s_max = request_s_max
        self._pages = pages
        self._hosts = own_hosts()
        self._server: asyncio.Server | None = None
        self._open = 0
        self._waiting: dict[
            asyncio.StreamWriter, None
        ] = {}  # connections without a request yet, oldest first

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raise OSError if it cannot be bound."""
        sock = listening(host, port)
        self._server = await asyncio.start_server(self._serve, sock=sock, limit=REQUEST_BYTES_MAX)
        return int(sock.getsockname()[1])

    def close(self) -> None:
        """Stop listening; responses being written are finished."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        self._waiting[writer] = None
        try:
            if self._open <= CONNECTIONS_MAX or self._abort_oldest_waiting():
                async with asyncio.timeout(self._request_s_max):
                    head = await reader.readuntil(b"\r\n\r\n")
                    self._waiting.pop(writer, None)
                    answer = await self._answer(head)
                    body, coded = (
                        await asyncio.to_thread(packed, answer.body, _accepts(head))
                        if answer.large
                        else (answer.body, {})
                    )
                    writer.write(_encode(answer, body, coded, head.startswith(b"HEAD ")))
                    await writer.drain()
            writer.close()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # not a request, or its client is gone
        finally:
            self._open -= 1
            self._waiting.pop(writer, None)

    def _abort_oldest_waiting(self) -> bool:
        """Abort the connection that has waited longest without a request. Return False if there is none besides the newest."""
        first = next(iter(self._waiting))
        if len(self._waiting) > 1:
            del self._waiting[first]
            first.transport.abort()
            return True
        return False

    async def _answer(self, head: bytes) -> PageAnswer:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        if why := refusal(_headers(head), self._hosts):
            return PageAnswer(f"{why}\n".encode(), "text/plain; charset=utf-8", HTTPStatus.FORBIDDEN)
        page = self._pages.get(rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1"))
        if method not in (b"GET", b"HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED)
        if page is None:
            return _error(HTTPStatus.NOT_FOUND)
        answer = page()
        return answer if isinstance(answer, PageAnswer) else await answer


def _error(status: HTTPStatus) -> PageAnswer:
    return PageAnswer(f"{status.phrase}\n".encode(), "text/plain; charset=utf-8", status)


def _headers(head: bytes) -> dict[str, str]:
    """Return the headers that the admin ports' guard checks."""
    lines = (line.decode("latin-1").partition(":") for line in head.split(b"\r\n")[1:])
    found = {name.strip().lower(): value.strip() for name, _, value in lines}
    return {
        name: found[name.lower()] for name in ("Host", "Origin", "Sec-Fetch-Site") if name.lower() in found
    }


def _accepts(head: bytes) -> str:
    """Return the encodings that a request accepts."""
    names = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return ",".join(
        value.decode("latin-1") for name, _, value in names if name.strip().lower() == b"accept-encoding"
    )


def _encode(answer: PageAnswer, body: bytes, coded: Mapping[str, str], head_only: bool) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in coded.items())
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.type}\r\n{more}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)
