"""Builds HTTP responses, and their bytes for connections that aiohttp does not write."""

from collections.abc import Mapping
from email.utils import formatdate

from aiohttp import web
from aiohttp.http import SERVER_SOFTWARE

from controller.frontend.errors import ApiError

JSON = "application/json"


def json_answer(body: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> web.Response:
    """Return a response with this JSON body."""
    return web.Response(status=status, body=body, content_type=JSON, headers=headers)


def refusal(error: ApiError, headers: Mapping[str, str]) -> web.Response:
    """Return an error as a response."""
    return json_answer(error.encoded(), {**headers, **error.headers}, error.status)


def encoded_response(response: web.Response) -> bytes:
    """Return the bytes of a response as aiohttp would write them."""
    body = response.body
    assert isinstance(body, bytes)
    headers = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
    return (
        f"HTTP/1.1 {response.status} {response.reason}\r\n{headers}Content-Length: {len(body)}\r\n"
        f"Date: {formatdate(usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
    ).encode() + body
