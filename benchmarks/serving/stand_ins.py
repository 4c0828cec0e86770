"""Stand-ins for vLLM servers, all in one process.

    python -m benchmarks.serving.stand_ins COUNT [TOKEN_MS]

Each server has its own port, and prints its URL. The next token depends only on the number of tokens so far, so an answer
continues correctly on any of them. `POST /fault/flood` makes a server send comments without end instead of tokens, `/fault/hang`
nothing at all, and `/fault/none` ends both.
"""

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

METRICS = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.0\n"
COMMENTS = b": keep-alive\n\n" * 4096
LOGPROB = -0.125


class StandIn:
    """One server, which answers a token every `token_s` seconds."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._fault = "none"

    async def start(self) -> str:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", lambda _: _done(web.Response())),
                web.get("/version", lambda _: _done(web.json_response({"version": "0.32.0"}))),
                web.get("/metrics", lambda _: _done(web.Response(text=METRICS))),
                web.get("/v1/models", lambda _: _done(web.json_response({"data": [MODEL]}))),
                web.post("/v1/completions", self._completions),
                web.post("/fault/{fault}", self._break),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _break(self, request: web.Request) -> web.Response:
        self._fault = request.match_info["fault"]
        return web.Response()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, most = body["prompt"], body["max_tokens"]
        tokens = [300 + 7 * (len(prompt) + n) % 1500 for n in range(most)]
        if body.get("do_remote_decode") or not body.get("stream"):
            return web.json_response(_event(body, tokens, "length"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for place, token in enumerate(tokens):
            while self._fault != "none":
                if self._fault == "flood":
                    await response.write(COMMENTS)
                await asyncio.sleep(0)
            await asyncio.sleep(self._token_s)
            finish = "length" if place + 1 == most else None
            await response.write(f"data: {json.dumps(_event(body, [token], finish))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


MODEL = {"id": "stand-in", "object": "model", "root": "stand-in", "max_model_len": 8192}


async def _done(response: web.Response) -> web.Response:
    return response


def _event(body: dict[str, Any], tokens: list[int], finish: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "text": " x" * len(tokens),
        "finish_reason": finish,
        "token_ids": tokens,
    }
    if "logprobs" in body:
        names = [f"token_id:{token}" for token in tokens]
        choice["logprobs"] = {
            "tokens": names,
            "token_logprobs": [LOGPROB] * len(tokens),
            "top_logprobs": [{name: LOGPROB} for name in names],
        }
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


async def serve(count: int, token_s: float) -> None:
    """Run the servers until the process is ended."""
    for _ in range(count):
        print(await StandIn(token_s).start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000 if len(sys.argv) > 2 else 0.02))
