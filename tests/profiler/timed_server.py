"""An OpenAI-compatible server with exactly known timing, so that measurements can be compared with it."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from waits import turns


@dataclass(eq=False)
class Running:
    """One answer in the batch."""

    tokens: int
    left: int
    events: "asyncio.Queue[bool]" = field(default_factory=asyncio.Queue)  # whether it was the last token


@dataclass
class LawfulServer:
    """Prompts are computed one after another, a batch steps together. Times are in milliseconds."""

    prefill: tuple[float, float] = (2.0, 0.01)  # per prompt, per token
    decode: tuple[float, float, float] = (4.0, 0.5, 0.001)  # per step, per request, per active token
    batch_max: int = 64
    context: int | None = 4096
    text_only: bool = False
    says_usage: bool = True
    obeys_ignore_eos: bool = True
    silent_tokens: int = 0  # every n-th token causes no event, like one that leaves a character incomplete
    models: tuple[str, ...] = ("lawful",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    _asked: asyncio.Event = field(default_factory=asyncio.Event)  # set when a request waits
    _batch: list[Running] = field(default_factory=list)
    _waiting: list[Running] = field(default_factory=list)

    async def start(self) -> "LawfulServer":
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._completions)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._computing = asyncio.Lock()
        self._stepping = asyncio.ensure_future(self._step())
        return self

    async def stop(self) -> None:
        self._stepping.cancel()
        await asyncio.wait((self._stepping,))
        await self._runner.cleanup()
        await turns(8)  # its connections are closed in the loop's next turns

    def ttft_ms(self, tokens: int) -> float:
        return self.prefill[0] + self.prefill[1] * tokens

    def itl_ms(self, batch: int, context: float) -> float:
        each, request, token = self.decode
        return each + request * batch + token * batch * context

    async def _step(self) -> None:
        while True:
            while self._waiting and len(self._batch) < self.batch_max:
                self._batch.append(self._waiting.pop(0))
            self._asked.clear()
            if not self._batch:
                await self._asked.wait()
                continue
            active = sum(one.tokens for one in self._batch)
            step_ms = self.itl_ms(len(self._batch), active / len(self._batch))
            await asyncio.sleep(step_ms / 1e3)  # the server's own times, which are measured
            for one in list(self._batch):
                one.tokens, one.left = one.tokens + 1, one.left - 1
                one.events.put_nowait(one.left == 0)
                if not one.left:
                    self._batch.remove(one)

    async def _models(self, request: web.Request) -> web.Response:
        about = {} if self.context is None else {"max_model_len": self.context}
        return web.json_response({"data": [{"id": name} | about for name in self.models]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        prompt = body["prompt"]
        if self.text_only and (isinstance(prompt, list) or "ignore_eos" in body):
            return web.json_response({"error": {"message": "prompt must be a string"}}, status=400)
        size = len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())  # two tokens per word
        if self.context is not None and size + body["max_tokens"] > self.context:
            return web.json_response({"error": {"message": "the context is exceeded"}}, status=400)
        return await self._answer(request, body, size)

    async def _answer(self, request: web.Request, body: dict[str, Any], size: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async with self._computing:
            await asyncio.sleep(self.ttft_ms(size) / 1e3)  # the same
        most = body["max_tokens"] if self.obeys_ignore_eos else min(3, body["max_tokens"])
        running, said, over = Running(size, most - 1), 1, most == 1
        await self._event(response, over)
        if not over:
            self._waiting.append(running)
            self._asked.set()
        while not over:
            over, said = await running.events.get(), said + 1
            if over or not self.silent_tokens or said % self.silent_tokens:
                await self._event(response, over)
        if self.says_usage:
            await self._send(
                response, {"choices": [], "usage": {"prompt_tokens": size, "completion_tokens": said}}
            )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, over: bool) -> None:
        choice = {"index": 0, "text": "so", "finish_reason": "length" if over else None}
        await self._send(response, {"choices": [choice]})

    async def _send(self, response: web.StreamResponse, said: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(said).encode() + b"\n\n")
