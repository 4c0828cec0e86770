"""A client that measures only the time of rejections, and so is not the bottleneck.

The client is a separate process with one kept-alive connection. At each arrival of the trace, it sends one prepared request
and waits for the answer. An arrival is skipped if the client still waits for the previous answer. A request that is admitted,
or that has no answer within a second because it is queued, is cancelled and not counted.
"""

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from http.client import HTTPResponse
from multiprocessing import get_context
from urllib.parse import urlsplit

from controller.demo.fleet import NotAsExpected

AT_ONCE_S = 1.0
LATE_S = 0.05  # an arrival that is later than this is skipped
PROMPT_TOKENS, FIRST_TOKEN, TOKENS = 64, 300, 1700
REFUSED = (429, 503, 529)
TIER, DEADLINE_MS = "best_effort", 4000


async def rejection_times(url: str, model: str, moments: Sequence[float]) -> list[float]:
    """Return the duration of each rejection in seconds. `moments` are the times of sending, in seconds from now.

    Raise NotAsExpected if the client cannot connect, or receives an error that is not a rejection. The client always ends,
    because each of its calls has a deadline.
    """
    loop = asyncio.get_running_loop()
    process = ProcessPoolExecutor(1, get_context("fork"))  # a spawned process would import all modules
    try:
        return await loop.run_in_executor(process, _measure, url, model, moments, time.time())
    except OSError as error:
        raise NotAsExpected(f"the client that times rejections has failed: {error}") from error
    finally:
        process.shutdown(wait=False, cancel_futures=True)  # waiting would block the loop


def _request(host: str, model: str, number: int) -> bytes:
    """Return the bytes of the request number `number`."""
    prompt = [FIRST_TOKEN + (number * PROMPT_TOKENS + n) % TOKENS for n in range(PROMPT_TOKENS)]
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"X-Request-Id: alone-{time.time_ns()}-{number}\r\nX-Priority: {TIER}\r\nX-Holdfast-Client: alone\r\n"
        f"X-Holdfast-TTFT-Deadline-Ms: {DEADLINE_MS}\r\n\r\n"
    )
    return head.encode() + body


def _refused(connection: socket.socket, request: bytes) -> bool:
    """Send a request, and return whether it was rejected within AT_ONCE_S. If not, the connection is unusable.

    Raise NotAsExpected if the answer is an error that is not a rejection.
    """
    connection.sendall(request)
    response = HTTPResponse(connection, method="POST")
    try:
        response.begin()
        if response.status == 200 or response.length is None:
            return False
        body = response.read()
    except TimeoutError:
        return False
    if response.status not in REFUSED:
        raise NotAsExpected(f"{response.status} is not a rejection: {body[:200]!r}")
    return True


def _measure(url: str, model: str, moments: Sequence[float], began: float) -> list[float]:
    """Send requests at these times in seconds after `began`. Return the duration of each rejection in seconds."""
    parts = urlsplit(url)
    where, took = (parts.hostname or "", parts.port or 80), list[float]()
    requests = [_request(parts.netloc, model, n) for n in range(len(moments))]
    connection = socket.create_connection(where, AT_ONCE_S)
    for moment, request in zip(moments, requests, strict=True):
        ahead_s = began + moment - time.time()
        if ahead_s < -LATE_S:
            continue
        time.sleep(max(0.0, ahead_s))
        sent = time.perf_counter()
        if _refused(connection, request):
            took.append(time.perf_counter() - sent)
        else:
            connection.close()
            connection = socket.create_connection(where, AT_ONCE_S)
    return took
