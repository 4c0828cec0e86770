"""The OpenAI-compatible API: from bytes to an exchange, and back.

A bare aiohttp server with a table of paths: an `Application`'s routing and middlewares would cost as much as
relaying thirty tokens, on every request.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog
from aiohttp import web

from controller.frontend.bodies import Ask, read_chat, read_completion, read_json
from controller.frontend.desk import Desk
from controller.frontend.errors import ApiError, internal, invalid, starting, unavailable, unknown_model
from controller.frontend.exchange import Admitted, Exchange, refuse_unobeyed
from controller.frontend.explain import explain
from controller.frontend.heads import ENDPOINTS, Head, read_head
from controller.frontend.intake import fresh_id, named, read_body, read_prompts
from controller.frontend.sse import SseStream, StreamedResponse, response_head
from controller.frontend.templates import BadTemplate
from controller.frontend.tokens import TokenizerMissing, Tokens, ready_tokens
from controller.frontend.voice import Form
from controller.frontend.wishes import Wishes, read_wishes
from controller.router.pick import NoWorker
from controller.router.table import Lineage

log = structlog.get_logger(__name__)
ERROR_TYPES = {
    400: "validation",
    404: "not_found",
    405: "validation",
    408: "validation",
    413: "validation",
    502: "backend_error",
    503: "unavailable",
    504: "response_timeout",
}
READS: dict[str, Callable[[bytes], Ask]] = {"chat_completions": read_chat, "completions": read_completion}

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Api:
    """What a frontend answers over HTTP."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.draining = False
        self.listening = False  # on the port that the host's frontends share
        self.answering = 0  # requests, from when they were understood to the end of their answers
        self.exchanges: dict[
            Exchange, SseStream | None
        ] = {}  # of these, those that have been let in and read
        self._unread: dict[SseStream, None] = {}  # finished, but their clients have not taken all of it yet
        self._serial = itertools.count(1)
        self._routes: dict[tuple[str, str], Handler] = {
            **{("POST", path): partial(self._serve, endpoint) for path, endpoint in ENDPOINTS.items()},
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._health,
            ("GET", "/live"): self._live,
            ("GET", "/metrics"): self._metrics,
        }

    # --- dispatch -----------------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        method = "GET" if request.method == "HEAD" else request.method  # aiohttp leaves the body out
        handler = self._routes.get((method, request.path))
        if handler is None and method == "GET" and request.path.startswith("/v1/models/"):
            handler = self._model
        try:
            if handler is None:
                raise self._nowhere(request)
            return await handler(request)
        except ApiError as error:
            return refusal(error, named(request))
        except Exception:  # a mistake of ours: this client gets an answer, and the others are not touched
            log.exception("request_failed", path=request.path[:200])
            transport = request.transport
            if request.writer.output_size or transport is None or transport.is_closing():
                raise
            return refusal(internal(), named(request))

    async def admin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request on the admin port: everything but the API."""
        if (request.method, request.path) == ("POST", "/route"):
            try:
                body = await read_body(request, self.desk.settings.admission)
                return web.json_response(await explain(self.desk, read_json(body)))
            except ApiError as error:
                return refusal(error, {})
        if request.path.startswith("/v1/"):
            why = "this is the admin port; the API is on the frontend's own port"
            return refusal(ApiError(404, why, code="unknown_url"), {})
        return await self.handle(request)

    def _nowhere(self, request: web.BaseRequest) -> ApiError:
        method = next((method for method, path in self._routes if path == request.path), "")
        if method:
            why = f"{request.path} wants {method}"
            return ApiError(
                405, why, code="method_not_allowed", allow="GET, HEAD" if method == "GET" else method
            )
        path = request.path[:200]
        return ApiError(404, f"unknown path: {request.method} {path}", code="unknown_url")

    # --- the two calls that matter ------------------------------------------------------------------------

    async def _serve(self, endpoint: str, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request for tokens that came the long way."""
        version = (request.version.major, request.version.minor)
        head = read_head(endpoint, request.headers, version, keep=bool(request.keep_alive))
        response = await self._respond(head, request, request.transport)
        return StreamedResponse(keep=head.keep) if response is None else response

    async def answer(self, head: Head, body: bytes, transport: asyncio.Transport) -> web.Response | None:
        """Answer a request for tokens that came the short way. Return what is to be written; None: it was streamed."""
        try:
            return await self._respond(head, body, transport)
        except Exception:  # a mistake of ours, as in `handle`
            log.exception("request_failed", endpoint=head.endpoint)
            return refusal(internal(), _named(head))

    async def _respond(
        self, head: Head, given: bytes | web.BaseRequest, transport: asyncio.Transport | None
    ) -> web.Response | None:
        """Answer a request, of which the body is given, or is still to be read. Return what is to be written; None: it was
        streamed."""
        headers = _named(head)
        model, kind = "", "unary"
        error: ApiError | None = None
        try:
            if isinstance(given, bytes):
                wishes, body = head.wishes, given
            else:
                wishes = read_wishes(given.raw_headers, self.desk.settings.router)
                body = await read_body(given, self.desk.settings.admission)
            ask = READS[head.endpoint](body)
            kind = "stream" if ask.stream else "unary"
            if ask.model not in self.desk.table.known:
                raise self._unknown(ask.model)
            model = ask.model
            self.desk.metrics.active.add(1, model)
            self.answering += 1
            response, error = await self._answer(head, ask, headers, wishes, transport)
            return response
        except ApiError as raised:
            error = raised
            response = refusal(raised, headers)
            if not isinstance(given, bytes) and given.content.exception() is not None:
                response.force_close()  # nobody can say where the next request begins
            return response
        except asyncio.CancelledError:
            error = ApiError(499, "the client has gone", code="cancelled")
            raise
        except Exception:
            error = internal()
            raise
        finally:
            self._count(model, head.endpoint, kind, error)

    def _unknown(self, model: str) -> ApiError:
        """Return what is said of a model that nobody serves, as far as is known."""
        return unknown_model(model) if self.desk.live else starting()

    async def _answer(
        self,
        head: Head,
        ask: Ask,
        headers: dict[str, str],
        wishes: Wishes,
        transport: asyncio.Transport | None,
    ) -> tuple[web.Response | None, ApiError | None]:
        """Return the response if it is still to be written, and what ended the stream, if it did not end well."""
        id = headers["X-Request-Id"]
        place = await self.desk.admission.admit(ask.model, head.tier)
        try:
            admitted, tokens = await self._admitted(head, ask, id, place.lineage, wishes)
        finally:
            place.free()  # for the flights, which are launched before anybody else's turn comes
        form = Form(
            id=("chatcmpl-" if ask.chat else "cmpl-") + id,
            model=ask.model,
            created=int(time.time()),  # noqa: TID251 (shown to the client, compared with nothing)
            chat=ask.chat,
            usage=ask.stream and ask.include_usage,
            tokens=tokens,
            stops=ask.stop,
            min_tokens=ask.min_tokens,
            logprobs=ask.logprobs,
        )
        stream = None
        if ask.stream:
            if transport is None:
                raise asyncio.CancelledError
            stream = SseStream(transport, self.desk.settings.stream, chunked=head.chunked)
        exchange = Exchange(self.desk, admitted, form, stream)
        if stream is not None:
            stream.begin(
                lambda: response_head(head, headers | exchange.headers), partial(self._cut, exchange, stream)
            )
        error = await self._fly(exchange, stream)
        if stream is not None and (error is None or stream.started):
            return None, error
        if stream is None and exchange.worker:
            headers |= exchange.headers
        if error is not None:
            raise error
        body = json.dumps(exchange.body(), ensure_ascii=False).encode()
        return web.Response(body=body, content_type="application/json", headers=headers), None

    async def _admitted(
        self, head: Head, ask: Ask, id: str, lineage: Lineage, wishes: Wishes
    ) -> tuple[Admitted, Tokens]:
        desk = self.desk
        routing = desk.routing
        if ask.guided or ask.logprobs is not None:
            engine, text_only = routing.engine(ask.model, lineage), routing.text_only(ask.model, lineage)
            refuse_unobeyed(ask, engine, text_only=text_only)
        began = desk.now()
        try:
            tokens = await ready_tokens(lineage[1])
            context = routing.context(ask.model, lineage)
            prompts = await read_prompts(ask, tokens, context)
        except TokenizerMissing as error:
            log.error("tokenizer_missing", model=ask.model, why=str(error))
            raise unavailable(
                f"the tokenizer of {ask.model} cannot be read", "tokenizer_missing", 30
            ) from error
        except BadTemplate as error:
            raise invalid(str(error), "messages") from error
        except NoWorker as error:  # the last one of this lineage has gone while its tokenizer was read
            raise desk.admission.no_worker(error, ask.model, head.tier) from error
        desk.metrics.tokenizer_ms.of("encode").note((desk.now() - began) * 1000)
        serial = next(self._serial)
        return Admitted(ask, id, head.tier, lineage, prompts, context, serial, head.trace, wishes), tokens

    async def _fly(self, exchange: Exchange, stream: SseStream | None) -> ApiError | None:
        """Launch and wait for the end. A client that goes away takes his flights with him."""
        self.exchanges[exchange] = stream
        try:
            exchange.launch()
            return await exchange.over
        except BaseException as why:  # whatever it is, nobody waits for its flights any more
            exchange.cancel()
            if isinstance(why, Exception) and stream is not None and stream.started:
                stream.abort()  # nothing can follow what has been said
            raise
        finally:
            del self.exchanges[exchange]
            if stream is not None and stream.waiting:
                self._unread[stream] = None
            elif stream is not None:
                stream.release()

    def check(self, now: float) -> None:
        """Cut off the clients that have not read for too long. Called every second."""
        for stream in [*self.exchanges.values(), *self._unread]:
            if stream is not None:
                stream.check(now)
        self._unread = {stream: None for stream in self._unread if stream.waiting}

    def _cut(self, exchange: Exchange, stream: SseStream, why: str) -> None:
        """Drop a client that does not read."""
        log.warning("client_cut_off", request=exchange.flights[0].plan.request, why=why)
        self.desk.metrics.slow_clients.inc()
        stream.abort()
        exchange.cancel()

    def _count(self, model: str, endpoint: str, kind: str, error: ApiError | None) -> None:
        """Count a request that has ended; an error after the first token too, although its status was 200."""
        metrics = self.desk.metrics
        if model:
            metrics.active.add(-1, model)
            self.answering -= 1
        if error is None:
            metrics.requests.add(1, model, endpoint, kind, "success", "")
            return
        why = "cancelled" if error.status == 499 else ERROR_TYPES.get(error.status, "internal")
        metrics.requests.add(1, model, endpoint, kind, "error", why)
        if error.status == 499:
            metrics.cancellations.labels(model, endpoint, kind).inc()
            metrics.disconnected.inc()
        elif error.status == 503:
            metrics.rejections.labels(model, endpoint).inc()

    # --- the rest -----------------------------------------------------------------------------------------

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self.desk.live and not self.desk.routing.served:
            raise starting()
        return web.json_response(
            {"object": "list", "data": [_row(model) for model in self.desk.routing.served]}
        )

    async def _model(self, request: web.BaseRequest) -> web.StreamResponse:
        model = request.path.removeprefix("/v1/models/")
        if model not in self.desk.routing.served:
            raise self._unknown(model)
        return web.json_response(_row(model))

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        servable = self.desk.routing.servable
        ready = servable and self.listening and not self.draining
        status = "healthy" if ready else "shutting_down" if self.draining else "not_ready"
        message = {
            "healthy": "requests are served",
            "not_ready": "its port is about to open"
            if servable
            else "no worker in service can be reached yet",
            "shutting_down": "this frontend finishes its streams and takes no new ones",
        }[status]
        body = {"status": status, "message": message, "workers": self.desk.routing.roll()}
        return web.json_response(body, status=200 if ready else 503)

    async def _live(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"status": "live", "message": "Service is live"})

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(
            body=self.desk.render_metrics(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )


def _named(head: Head) -> dict[str, str]:
    """Return the headers that every answer to this request has."""
    headers = {"X-Request-Id": head.id or fresh_id()}
    if head.warning:
        headers["Warning"] = head.warning
    return headers


def _row(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "holdfast"}


def refusal(error: ApiError, headers: dict[str, str]) -> web.Response:
    """Return an error as a response."""
    return web.Response(
        status=error.status,
        body=error.encoded(),
        content_type="application/json",
        headers={**headers, **error.headers},
    )
