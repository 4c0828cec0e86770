"""An OpenAI-compatible server that records requests and answers as scripted. Runs in its own thread."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

READY_S = 10.0
FLOOD = b'data: {"choices": [{"index": 0, "text": " w"}]}\n\n' * 2000


@dataclass
class Asked:
    """One request. Times are of time.perf_counter."""

    at: float
    path: str
    body: dict[str, Any]
    name: str


@dataclass
class Scripted:
    """The script and the recorded requests. Requests are counted from 1, without probes (at most two tokens)."""

    models: tuple[str, ...] = ("m",)
    text_only: bool = False
    strict: bool = False  # accepts only OpenAI's own fields
    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens_max: int = 1_000_000
    cached: int | None = None
    faults: dict[int, str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    in_flight: int = 0
    in_flight_max: int = 0
    flooded: int = 0  # bytes of answers without an end
    url: str = ""

    async def models_listed(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(
            time.perf_counter(), request.path, await request.json(), request.headers.get("X-Request-Id", "")
        )
        body, chat = asked.body, request.path.endswith("chat/completions")
        if (self.strict and "ignore_eos" in body) or (
            self.text_only and isinstance(body.get("prompt"), list)
        ):
            return web.json_response({"error": {"message": "not taken", "code": "invalid_value"}}, status=400)
        fault = ""
        if body["max_tokens"] > 2:
            self.asked.append(asked)
            fault = self.faults.get(len(self.asked), "")
        if fault == "503":
            return web.json_response(
                {"error": {"message": "too many wait", "code": "queue_full"}}, status=503
            )
        if fault == "json":
            return web.json_response({"choices": []})
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            return await self._stream(request, body, chat, fault)
        finally:
            self.in_flight -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], chat: bool, fault: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(event: Any) -> None:
            await response.write(
                f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            )

        await response.write(b": a comment\n\n")
        if chat:
            await say({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        tokens = min(body["max_tokens"], self.tokens_max)
        for number in range(tokens):
            if wait_s := self.itl_s if number else self.ttft_s:
                await asyncio.sleep(wait_s)  # the server's own times, which are measured
            while fault == "flood":
                await response.write(FLOOD)
                self.flooded += len(FLOOD)
            if number == 1 and fault in ("broke", "error", "hang", "silent"):
                if fault == "broke":
                    assert request.transport is not None
                    request.transport.abort()
                elif fault == "error":
                    await say({"error": {"message": "no worker is left", "code": "disconnected"}})
                elif fault == "hang":
                    await asyncio.Event().wait()
                return response
            text = {"delta": {"content": f" w{number}"}} if chat else {"text": f" w{number}"}
            finish = "length" if number == tokens - 1 else None
            await say({"choices": [{"index": 0, **text, "finish_reason": finish}]})
        usage: dict[str, Any] = {"prompt_tokens": prompt_tokens(body), "completion_tokens": tokens}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        await say({"choices": [], "usage": usage})
        await say("[DONE]")
        return response


def prompt_tokens(body: dict[str, Any]) -> int:
    """Return the length of a prompt: a letter is a token, and a chat template adds 7."""
    chat = "messages" in body
    prompt = body["messages"][0]["content"] if chat else body["prompt"]
    if isinstance(prompt, list):
        return len(prompt)
    return 7 * chat + len(prompt.replace(" ", ""))


@contextmanager
def serving(**script: Any) -> Iterator[Scripted]:
    """Run a server until the end of the block."""
    server, ready, over = Scripted(**script), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/v1/models", server.models_listed),
                web.post("/v1/completions", server.answer),
                web.post("/v1/chat/completions", server.answer),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert ready.wait(READY_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(READY_S)
        loop.close()
