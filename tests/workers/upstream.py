"""A test double of an OpenAI-compatible server, with the dialects of real servers and faults.

It answers like the simulated engine.

Dialects: `vllm` accepts and returns token ids. `llamacpp` accepts token ids and returns them with logprobs, if at all (it omits
a token that leaves a character incomplete: here, every id divisible by 7). `strict` accepts token ids and rejects fields that
OpenAI's API does not have. `text` knows only text.
"""

import asyncio
import json
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from controller.adapters.embedded.free_port import free_port
from events.wire import Chunk, Generate, Logprob, Sampling
from workers.engines.openai.exchange import WORD
from workers.engines.simulated.language import prompt_logprobs
from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.sequence import EngineShape

Manner = Literal["vllm", "llamacpp", "strict", "text"]
FIELDS = set(Sampling.__struct_fields__) - {"max_tokens", "logprobs", "prompt_logprobs"}
LIMITS = {"allowed_token_ids", "bad_words"}
EXTENSIONS = {"return_token_ids", "return_tokens_as_token_ids", "cache_salt", "cache_prompt"}


def spelled(word: str) -> list[int]:
    """Return the tokens of a bad word, which has their numbers: the double's text of token 300 is "<300>"."""
    return [int(number) for number in word.split()]


@dataclass
class OtherPath:
    """The server's behaviour at a path other than completions."""

    pieces: list[bytes]  # of the body, each written alone
    status: int = 200
    media: str = "application/json"
    breaks: bool = False  # the connection breaks after the pieces
    hangs: bool = False  # nothing follows the pieces until `Upstream.release`
    retry_after: str = ""


@dataclass
class Upstream:
    """The server's behaviour. `fault` affects every completion after `after` good tokens, except probes."""

    manner: Manner = "vllm"
    fault: str = ""
    after: int = 3
    token_s: float = 0.0
    context: int = 2048
    healthy: bool = True
    answers: bool = True  # health checks; otherwise they wait until `release`
    checks: int = 0  # health checks received
    defaults: dict[str, Any] = field(default_factory=dict)  # for what a request omits
    model: str = "up"
    root: str = ""  # of its weights, if it reports one
    names: tuple[str, ...] = ()  # further names of the same weights
    adapters: tuple[str, ...] = ()  # LoRA adapters that are loaded
    sglang: bool = False  # it selects an adapter by `lora_path`, and ignores `model`
    version: str = "0.32.0"  # empty: it cannot be read now
    retry_after: str = ""  # with each `http_` fault, if set
    listings: int = 0  # times that its models were listed
    comments: int = 0  # sent with the fault "pings"
    denials: int = 0  # requests without its key
    weights: str = ""  # servers with equal weights give equal answers, whatever their names
    key: str = ""  # the required key; empty: none
    headers: list[dict[str, str]] = field(default_factory=list)  # of each completion
    denied: int = 401  # the status without it
    bodies: list[dict[str, Any]] = field(default_factory=list)
    peers: list[Any] = field(default_factory=list)  # the client address of each body
    traces: list[str | None] = field(default_factory=list)  # and its trace
    ranks: list[str | None] = field(default_factory=list)  # the DP rank of every completion, including probes
    # Field names by which it constrains its answers; it ignores others, like real servers
    obeys: frozenset[str] = frozenset()
    reads: frozenset[str] = (
        frozenset()
    )  # names it validates and does not obey here, like vLLM behind a reasoning parser
    probes: list[dict[str, Any]] = field(default_factory=list)  # probes of the names that it obeys
    broken_probes: int = 0  # number of probes to answer with 500
    connector: bool = False  # it hands over KV caches by handles
    stalled_handles: bool = False  # making a handle never ends
    broken_handles: bool = False  # making a handle fails
    lacking_handles: int = 0  # number of handle requests to answer without one
    metrics: str = ""  # the text of /metrics; empty: no such page
    tells: dict[str, Any] = field(default_factory=dict)  # of its weights, like SGLang; empty: no such pages
    size: int | None = None  # size of its weights, as llama-server lists it
    stored: Callable[[list[int], str], None] | None = None  # called with each prompt and its salt
    streaming: int = 0
    abandoned: int = 0  # streams abandoned by their reader
    url: str = ""
    release: asyncio.Event = field(default_factory=asyncio.Event)  # ends a stall
    others: dict[str, OtherPath] = field(default_factory=dict)  # by path
    generates: bool = True  # whether it has /v1/completions
    documented: bool = True  # whether it lists its paths at /openapi.json
    passed_on: list[tuple[str, str, bytes]] = field(default_factory=list)  # path, media type and body
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> "Upstream":
        app = web.Application(client_max_size=64 * 1024 * 1024, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/get_model_info", self._info),
                web.get("/get_server_info", self._info),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.get("/openapi.json", self._openapi),
                web.post("/{path:.+}", self._other),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or free_port(), ssl_context=tls)
        await site.start()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        self.release.set()
        if self._runner is not None:
            await self._runner.cleanup()
            await asyncio.sleep(0.05)  # its connections are closed in the loop's next rounds

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            self.denials += 1
            return web.Response(status=self.denied)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _health(self, request: web.Request) -> web.Response:
        self.checks += 1
        if not self.answers:
            await self.release.wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _openapi(self, request: web.Request) -> web.Response:
        if not self.documented:
            raise web.HTTPNotFound
        own = ["/sleep", "/v1/completions"] if self.generates else ["/sleep"]
        return web.json_response({"paths": {path: {} for path in (*own, *self.others)}})

    async def _other(self, request: web.Request) -> web.StreamResponse:
        self.passed_on.append((request.path, request.headers.get("Content-Type", ""), await request.read()))
        self.traces.append(request.headers.get("traceparent"))
        known = self.others.get(request.path)
        if known is None:
            raise web.HTTPNotFound
        headers = {"Content-Type": known.media} | (
            {"Retry-After": known.retry_after} if known.retry_after else {}
        )
        response = web.StreamResponse(status=known.status, headers=headers)
        await response.prepare(request)
        try:
            for piece in known.pieces:
                await response.write(piece)
                await asyncio.sleep(0.005)  # so that the pieces arrive apart
            if known.hangs:
                await self.release.wait()
        except (asyncio.CancelledError, ConnectionError):
            self.abandoned += 1
            raise
        if known.breaks and request.transport is not None:
            request.transport.abort()
        return response

    async def _version(self, request: web.Request) -> web.Response:
        if self.manner != "vllm":
            raise web.HTTPNotFound
        if not self.version:
            raise web.HTTPBadGateway
        return web.json_response({"version": self.version})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.metrics:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics)

    async def _info(self, request: web.Request) -> web.Response:
        if not self.tells:
            raise web.HTTPNotFound
        return web.json_response({"model_path": self.root, "start_time": self.listings, **self.tells})

    async def _models(self, request: web.Request) -> web.Response:
        self.listings += 1
        about: dict[str, Any] = {"id": self.model, "object": "model", "created": self.listings}
        about["owned_by"] = "sglang" if self.sglang else "vllm"
        if self.root:
            about["root"] = self.root
        if self.manner == "vllm":
            about["max_model_len"] = self.context
        else:
            about["meta"] = {"n_ctx": self.context} | ({"size": self.size} if self.size else {})
        further = [{**about, "id": name} for name in self.names]
        adapters = [{**about, "id": name, "root": f"/{name}", "parent": self.model} for name in self.adapters]
        return web.json_response({"object": "list", "data": [about, *further, *adapters]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if not self.generates:
            raise web.HTTPNotFound
        body = await request.json()
        if self.sglang and body.get("lora_path") not in (None, *self.adapters):
            return web.json_response({"error": {"message": "the adapter was never loaded"}}, status=400)
        if not self.sglang and body["model"] not in (self.model, *self.adapters):
            return web.json_response({"error": {"message": "the model does not exist"}}, status=404)
        if refusal := self._refusal(body):
            return web.json_response({"error": {"message": refusal, "code": 400}}, status=400)
        self.ranks.append(request.headers.get("X-data-parallel-rank"))
        if self.stored is not None:
            self.stored(body["prompt"], body.get("cache_salt", ""))
        answer = list(self._answer(body))
        handle = body.get("kv_transfer_params") or {}
        if not body.get("stream"):
            event = self._event(body, answer, "length")
            choice = event["choices"][0]
            probe = {
                name: body[name]
                for name in ("structured_outputs", "guided_choice", "guided_regex", "response_format")
                if name in body
            }
            if probe:
                self.probes.append(probe)
                if self.broken_probes:
                    self.broken_probes -= 1
                    raise web.HTTPInternalServerError
            if self._contradicted(probe):
                return web.json_response({"error": {"message": "only one constraint"}}, status=400)
            if word := self._only_word(body):
                choice["text"] = word
            if self.manner == "vllm" and "prompt_logprobs" in body:
                choice["prompt_logprobs"] = self._prompt_logprobs(body)
            if self.connector and handle.get("do_remote_decode"):
                if self.stalled_handles:
                    await self.release.wait()
                if self.broken_handles:
                    raise web.HTTPInternalServerError
                if self.lacking_handles:
                    self.lacking_handles -= 1
                else:
                    event["kv_transfer_params"] = self._handle(body)
            return web.json_response(event)
        if handle.get("do_remote_prefill") and len(body["prompt"]) != handle["tokens"]:
            raise AssertionError("vLLM's engine dies of a handle of fewer tokens")
        self.bodies.append(body)
        self.traces.append(request.headers.get("traceparent"))
        self.headers.append(dict(request.headers))
        self.peers.append(request.transport and request.transport.get_extra_info("peername"))
        if self.fault.startswith("http_"):
            status = int(self.fault[5:])
            more = {"Retry-After": self.retry_after} if self.retry_after else None
            error = {"error": {"message": f"told to answer {status}"}}
            return web.json_response(error, status=status, headers=more)
        return await self._stream(request, body, answer)

    def _contradicted(self, probe: dict[str, Any]) -> bool:
        """Return whether a constraint contradicts itself, by a name that is validated, or is of an unsupported kind."""
        known = self.reads | self.obeys
        return (
            ("structured_outputs" in known and len(probe.get("structured_outputs", ())) > 1)
            or ("no grammars" in known and "grammar" in probe.get("structured_outputs", ()))
            or ("guided" in known and {"guided_choice", "guided_regex"} <= probe.keys())
            or ("response_format" in known and probe.get("response_format", {}).get("type") == WORD)
        )

    def _only_word(self, body: dict[str, Any]) -> str:
        """Return the only answer that an obeyed constraint allows, if any."""
        words: list[str] = []
        if "structured_outputs" in self.obeys:
            given = body.get("structured_outputs", {})
            words += given.get("choice", ())
            if f'"{WORD}"' in given.get("grammar", ""):
                words.append(WORD)
        if "guided" in self.obeys:
            words += body.get("guided_choice", ())
        if "response_format" in self.obeys and "response_format" in body:
            schema = body["response_format"].get("json_schema", {}).get("schema", {})
            words += [json.dumps(one) for one in schema.get("enum", ())]
        for style, name in (("ebnf", "ebnf"), ("gbnf", "grammar")):
            if style in self.obeys and f'"{WORD}"' in body.get(name, ""):
                words.append(WORD)
        return words[0] if words else ""

    def _prompt_logprobs(self, body: dict[str, Any]) -> list[dict[str, dict[str, Any]] | None]:
        """Return the logprobs of each token of the prompt, like vLLM: of that token, and of the best ones."""
        eos = not body.get("ignore_eos", False)
        found = prompt_logprobs(self.model, body["prompt"], body["prompt_logprobs"], eos=eos)
        return [None] + [
            {
                str(t): {"logprob": value, "rank": rank, "decoded_token": f"<{t}>"}
                for rank, (t, value) in [(99, (token, one.chosen)), *enumerate(one.top, 1)]
            }
            for token, one in zip(body["prompt"][1:], found[1:], strict=True)
        ]

    def _handle(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the location of a prompt's KV cache, like vLLM's NIXL connector."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[*range(len(body["prompt"]) // 32 + 1)]],
            "remote_engine_id": self.url,
            "tokens": len(body["prompt"]),
        }

    def _refusal(self, body: dict[str, Any]) -> str:
        prompt = body["prompt"]
        if self.manner in ("strict", "text") and (extra := EXTENSIONS & set(body)):
            return f"unknown fields: {extra}"
        if self.manner == "text":
            return "prompt must be a string" if isinstance(prompt, list) else ""
        if isinstance(prompt, list) and any(token >= 2048 for token in prompt):
            return "a token id is out of the vocabulary"
        if any(int(token) >= 2048 for token in body.get("logit_bias", ())):
            return "logit_bias contains an id that is out of the vocabulary"
        if any(token >= 2048 for token in body.get("allowed_token_ids", ())):
            return "allowed_token_ids contains an id that is out of the vocabulary"
        if len(prompt) + body["max_tokens"] > self.context:
            return "this model's maximum context length is exceeded"
        return ""

    def _answer(self, body: dict[str, Any]) -> Iterator[Chunk]:
        """Yield the undisturbed answer, a chunk per token."""
        body = {**self.defaults, **body}
        if body.get("top_k") == -1:
            body["top_k"] = 0
        if "logit_bias" in body:
            body["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
        if self.manner == "vllm" and "limits ignored" not in self.obeys:
            body["bad_word_tokens"] = [spelled(word) for word in body.pop("bad_words", ())]
        else:
            body = {name: value for name, value in body.items() if name not in LIMITS}
        prompt = body["prompt"]
        tokens = [300 + byte for byte in prompt.encode()] if isinstance(prompt, str) else prompt
        sampling = Sampling(
            max_tokens=body["max_tokens"],
            temperature=body.get("temperature", 1.0),
            logprobs=max(1, body.get("logprobs", 0)),
            **{name: body[name] for name in FIELDS if name in body and name != "temperature"},
        )
        scheduler = Scheduler(EngineShape(model=self.weights_of(body), context_tokens=self.context))
        # A server cannot distinguish a prompt from replayed tokens; this double must know them for penalties.
        scheduler.submit(1, Generate(1, "r", tokens, body.get("prompt_tokens", len(tokens)), sampling))
        while not scheduler.plan().idle:
            yield from (chunk for _, chunk in scheduler.step())

    def weights_of(self, body: dict[str, Any]) -> str:
        """Return the name of the weights that answer a request: those of the model, or also of an adapter."""
        named = body.get("lora_path", self.model) if self.sglang else body["model"]
        return self.model + self.weights + (named if named in self.adapters else "")

    async def _stream(
        self, request: web.Request, body: dict[str, Any], answer: list[Chunk]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.streaming += 1
        try:
            for place, chunk in enumerate(answer):
                if self.fault and place == self.after:
                    await self._misbehave(request, response, body, chunk)
                    return response
                if self.token_s:
                    await asyncio.sleep(self.token_s)  # the speed of the server
                if self.manner != "llamacpp" or chunk.tokens[0] % 7 or chunk.finish:
                    await self._send(response, self._event(body, [chunk], chunk.finish))
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.abandoned += 1
            raise
        finally:
            self.streaming -= 1
        return response

    async def _misbehave(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], chunk: Chunk
    ) -> None:
        assert request.transport is not None
        match self.fault:
            case "zeros":
                for _ in range(20):
                    await self._send(response, self._event(body, [Chunk(0, [0])], None))
            case "zeros_then_stop":
                await self._send(response, self._event(body, [Chunk(0, [0])] * 2, "stop"))
            case "null_logprob":
                event = self._event(body, [chunk], None)
                event["choices"][0]["logprobs"] = {"token_logprobs": [None], "tokens": ["x"]}
                await self._send(response, event)
            case "abort":
                await self._send(response, self._event(body, [], "abort"))
                await response.write(b"data: [DONE]\n\n")
            case "error_then_done":
                await self._send(response, {"error": {"message": "EngineCore died", "code": 500}})
                await response.write(b"data: [DONE]\n\n")
            case "done_without_finish":
                await response.write(b"data: [DONE]\n\n")
            case "no_finish":
                await response.write_eof()
            case "not_json":
                await response.write(b"data: <html>bad gateway</html>\n\n")
            case "odd_choice":
                await self._send(response, {"choices": [None]})
            case "odd_choices":
                await self._send(response, {"choices": {"first": "one"}})
            case "odd_ids":
                event = self._event(body, [chunk], None)
                event["choices"][0]["token_ids"] = [300, None]
                await self._send(response, event)
            case "cut":
                request.transport.abort()
            case "too_many":
                await self._send(response, self._event(body, [Chunk(0, [300] * 5000)], None))
            case "long_line":
                await response.write(b"data: " + b"x" * (5 * 1024 * 1024))
            case "pings":
                while not self.release.is_set():
                    await response.write(b": keep-alive\n\n")
                    self.comments += 1
                    await asyncio.sleep(0.01)  # the interval of the pings
            case "flood":
                while not self.release.is_set():
                    await response.write(b": keep-alive\n\n" * 4096)
                    self.comments += 4096
            case "stall":
                await self.release.wait()
            case _:
                raise AssertionError(f"no such fault: {self.fault}")

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\r\n\r\n".encode()
        half = len(data) // 2
        await response.write(data[:half])  # events arrive in pieces now and then
        await response.write(data[half:])

    def _event(self, body: dict[str, Any], chunks: list[Chunk], finish: str | None) -> dict[str, Any]:
        tokens = [token for chunk in chunks for token in chunk.tokens]
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(f"<{token}>" for token in tokens if token > 2),
            "finish_reason": finish,
            "logprobs": None,
        }
        if self.manner == "vllm" and body.get("return_token_ids"):
            choice["token_ids"] = tokens
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs or []]
        if "logprobs" in body and logprobs:
            choice["logprobs"] = self._logprobs(body, tokens, logprobs)
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "system_fingerprint": "b7777",
            "choices": [choice],
        }

    def _logprobs(self, body: dict[str, Any], tokens: list[int], found: list[Logprob]) -> dict[str, Any]:
        if self.manner == "llamacpp":
            return {
                "content": [
                    {
                        "id": token, "token": f"<{token}>", "logprob": one.chosen,
                        "top_logprobs": [{"id": t, "token": f"<{t}>", "logprob": v} for t, v in one.top],
                    }
                    for token, one in zip(tokens, found, strict=True)
                ]
            }  # fmt: skip
        name = "token_id:{}" if body.get("return_tokens_as_token_ids") else "<{}>"
        return {
            "tokens": [name.format(token) for token in tokens],
            "token_logprobs": [one.chosen for one in found],
            "top_logprobs": [{name.format(t): v for t, v in one.top} for one in found],
        }
