"""The setting limits the size of heads.

A larger or invalid one gets an OpenAI error without quoted input.
"""

import asyncio
import json
from typing import Any

import pytest
from frontend_kit import frontend
from scripted_worker import ScriptedWorker

SECRET = "sk-planted-secret"


async def answered(port: int, raw: bytes) -> tuple[int, Any, bytes]:
    """Return status, JSON body and all bytes of the response to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    async with asyncio.timeout(20):
        said = await reader.read()
    writer.close()
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body), said


def head(*lines: str) -> bytes:
    return "\r\n".join(
        ["GET /v1/models HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *lines, "", ""]
    ).encode()


async def test_a_head_up_to_the_setting_is_accepted_and_a_larger_one_gets_431() -> None:
    async with frontend(ScriptedWorker(), connections={"head_bytes_max": 20_000}) as kit:
        for where in (kit.url, kit.admin):
            port = int(where.rpartition(":")[2])
            status, _, _ = await answered(port, head("X-Long: " + "a" * 19_000))
            assert status in (200, 404)
            for lines in (
                [f"Authorization: Bearer {SECRET}{'a' * 20_000}"],
                [f"X-{n}: {SECRET}{'a' * 1000}" for n in range(20)],
            ):
                status, body, said = await answered(port, head(*lines))
                error = body["error"]
                assert (status, error["code"], error["type"]) == (
                    431,
                    "headers_too_large",
                    "invalid_request_error",
                )
                assert "20000 bytes" in error["message"] and SECRET.encode() not in said
        assert kit.counted("holdfast_bound_refusals_total", "bound") == {("head_bytes",): 4}


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /" + SECRET.encode() + b" HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01" + SECRET.encode() + b"\r\n\r\n",
        head(f"Authorization\x00: Bearer {SECRET}"),
        head(f"{SECRET}"),
        head("Content-Length: x"),
    ],
)
async def test_an_invalid_http_request_is_refused_in_the_same_format_without_quoting_it(raw: bytes) -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, body, said = await answered(int(kit.url.rpartition(":")[2]), raw)
        assert (status, body["error"]["code"]) == (400, "invalid_http") and SECRET.encode() not in said
