"""A client that only measures the time of rejections, so that it is not the bottleneck.

It is a separate process with one kept-alive connection. At each arrival of the trace it sends one more request, with
prepared bytes, and waits for the answer, unless it still waits for the last one. A request that is admitted, or has no answer
within a second (it is queued), is cancelled and not counted.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from controller.demo.fleet import NotAsExpected

AT_ONCE_S = 1.0
LATE_S = 0.05  # after which an arrival is skipped
ENDS_WITHIN_S = 30.0  # after the last arrival
PROMPT_TOKENS, FIRST_TOKEN, TOKENS = 64, 300, 1700
REFUSED = (429, 503, 529)
TIER, DEADLINE_MS = "best_effort", 4000


class RefusalClient:
    """The process, as the benchmark sees it."""

    def __init__(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        self._process, self._seconds = process, seconds

    @classmethod
    async def start(cls, url: str, model: str, moments: Sequence[float]) -> "RefusalClient":
        """Start it; `moments` are in seconds from now."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", __name__)
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdin is not None, "it is piped"
        task = {"url": url, "model": model, "moments": list(moments), "began": time.time()}
        process.stdin.write(json.dumps(task).encode())
        process.stdin.close()
        return cls(process, moments[-1] if moments else 0.0)

    async def took_s(self) -> list[float]:
        """Return the seconds of each rejection, after the last one. Raise NotAsExpected if the process does not end."""
        try:
            async with asyncio.timeout(self._seconds + ENDS_WITHIN_S):
                said, _ = await self._process.communicate()
        except TimeoutError:
            self._process.kill()
            raise NotAsExpected("the rejected client does not end") from None
        if self._process.returncode:
            raise NotAsExpected(f"the rejected client ended with status {self._process.returncode}")
        return list(json.loads(said))


def _request(host: str, model: str, number: int) -> bytes:
    """Return a request's bytes."""
    prompt = [FIRST_TOKEN + (number * PROMPT_TOKENS + n) % TOKENS for n in range(PROMPT_TOKENS)]
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"X-Request-Id: alone-{time.time_ns()}-{number}\r\nX-Priority: {TIER}\r\nX-Holdfast-Client: alone\r\n"
        f"X-Holdfast-TTFT-Deadline-Ms: {DEADLINE_MS}\r\n\r\n"
    )
    return head.encode() + body


def _refused(connection: socket.socket, request: bytes) -> bool:
    """Send a request and read its rejection to the end; False: it was not rejected at once, and the connection is unusable."""
    connection.sendall(request)
    got = b""
    try:
        while b"\r\n\r\n" not in got:
            got += _some(connection)
        head, _, body = got.partition(b"\r\n\r\n")
        lines = (line.partition(b":") for line in head.lower().split(b"\r\n")[1:])
        length = next((int(value) for name, _, value in lines if name == b"content-length"), None)
        status = int(head.split(b" ", 2)[1])
        if status == 200 or length is None:
            return False
        while len(body) < length:
            body += _some(connection)
        if status not in REFUSED:
            raise SystemExit(f"{status} is not a rejection: {body[:200]!r}")
    except TimeoutError:
        return False
    return True


def _some(connection: socket.socket) -> bytes:
    if not (data := connection.recv(1 << 16)):
        raise ConnectionError("the frontend closed the connection")
    return data


def main() -> int:
    """Send a request at each moment listed on standard input, and print the seconds of each rejection."""
    task = json.load(sys.stdin)
    url = urlsplit(task["url"])
    where, took = (url.hostname or "", url.port or 80), list[float]()
    requests = [_request(url.netloc, task["model"], n) for n in range(len(task["moments"]))]
    connection = socket.create_connection(where, AT_ONCE_S)
    for moment, request in zip(task["moments"], requests, strict=True):
        ahead_s = task["began"] + moment - time.time()
        if ahead_s < -LATE_S:
            continue
        time.sleep(max(0.0, ahead_s))
        began = time.perf_counter()
        if _refused(connection, request):
            took.append(time.perf_counter() - began)
        else:
            connection.close()
            connection = socket.create_connection(where, AT_ONCE_S)
    print(json.dumps(took))
    return 0


if __name__ == "__main__":
    sys.exit(main())
