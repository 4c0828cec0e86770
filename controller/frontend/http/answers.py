"""Answers as HTTP responses, and their bytes where aiohttp does not write them."""

from collections.abc import Mapping
from email.utils import formatdate

from aiohttp import web
from aiohttp.http import SERVER_SOFTWARE

from controller.frontend.errors import ApiError

JSON = "application/json"


def json_answer(body: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> web.Response:
    """Return a response with this JSON."""
    return web.Response(status=status, body=body, content_type=JSON, headers=headers)


def refusal(error: ApiError, headers: Mapping[str, str]) -> web.Response:
    """Return an error as a response."""
    return json_answer(error.encoded(), {**headers, **error.headers}, error.status)


def written(response: web.Response) -> bytes:
    """Return a response as aiohttp writes it."""
    body = response.body
    assert isinstance(body, bytes)
    headers = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
    return (
        f"HTTP/1.1 {response.status} {response.reason}\r\n{headers}Content-Length: {len(body)}\r\n"
        f"Date: {formatdate(usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
    ).encode() + body
