"""The endpoints of chat and text completions, from request bytes to response."""

import asyncio
import itertools
from functools import partial

import msgspec
import structlog
from aiohttp import web

from controller.frontend.admission.admission import Reservation
from controller.frontend.director import Director
from controller.frontend.errors import ApiError, internal, invalid, shutting_down, unavailable
from controller.frontend.http.credentials import ApiKeys
from controller.frontend.http.request_reader import RequestReader, admitted_proxied
from controller.frontend.http.responses import Cors, refusal
from controller.frontend.http.stored_responses import StoredResponses
from controller.frontend.openai import request_head as heads
from controller.frontend.openai.completion import (
    FORMATS,
    AdmittedRequest,
    Completion,
    answer_tokens,
    read_prompts,
    refuse_unsupported,
)
from controller.frontend.openai.field_names import in_terms_of
from controller.frontend.openai.intake import Intake
from controller.frontend.openai.output_formats import FormatTable, check_formats
from controller.frontend.openai.request_head import Head
from controller.frontend.openai.sse import SseStream, StreamedResponse
from controller.frontend.openai.text.chat_templates import BadTemplate
from controller.frontend.openai.text.tokenizer import BUILTIN, TokenizerMissing, Tokens, ready_tokens
from controller.frontend.request.routing_overrides import read_overrides
from controller.router.endpoints import EndpointGroup, Lineage
from controller.router.selection.filter import NoWorker
from events.blocks import BlockNames, seed
from events.grammar.constraint import Constraint, constraint_of
from events.grammar.refusals import GrammarRefused
from events.json_types import Json

TOKENIZER_RETRY_S = 30  # `Retry-After` in seconds if a tokenizer cannot be loaded

log = structlog.get_logger(__name__)


class OpenAiEndpoints:
    """Serves completion requests, and tracks the requests in progress."""

    def __init__(self, director: Director) -> None:
        """Serve requests through `director`, which contains the components of this frontend."""
        self.director = director
        self._driver = director.driver
        self.tokens = ready_tokens  # loads a tokenizer by its name, or raises TokenizerMissing
        self.listening = False  # whether connections are accepted on the port that the host's frontends share
        self._over = False  # if true, all requests are refused
        self.intake = Intake(director.settings, director.metrics.bounds)
        key_file = director.settings.api_key_file
        self._reader = RequestReader(director, self.intake)
        self.cors = Cors(director.settings.cors_origins)
        self.keys = ApiKeys(key_file, director.metrics.bounds) if key_file else None
        self.responses = StoredResponses(director)
        self.answering = 0  # requests between the parsing of their body and the end of their response
        self.completions: dict[Completion, None] = {}  # requests that are admitted and tokenized
        self._streams: dict[SseStream, None] = {}  # of requests in progress, also queued ones
        self._unread: dict[SseStream, None] = {}  # finished, with data that clients have not read
        self._serial = itertools.count(1)
        settings = director.settings
        self._formats = FormatTable(settings.tool_call_parsers, settings.reasoning_parsers)
        self._admission = director.admission
        self._requests = director.metrics.requests
        self._counts = director.request_metrics
        self._tokenizer_ms = director.metrics.histograms.tokenizer_ms.of

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because this frontend drains."""
        return not self._admission.open

    @property
    def ready(self) -> bool:
        """Whether this frontend accepts connections, and a worker could serve a request."""
        return self.director.routing.monitor.servable and self.listening and not self.draining

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle a completion request that arrived through aiohttp."""
        version, tiers = (request.version.major, request.version.minor), self.director.table.tiers
        keep = bool(request.keep_alive)
        head = heads.read_head(request.path, request.headers, version, tiers, keep=keep)
        response = await self._respond(head, request, request.transport)
        return StreamedResponse(keep=head.keep) if response is None else response

    async def answer(self, head: Head, body: bytes, transport: asyncio.Transport) -> web.Response | None:
        """Handle a completion request that arrived on the fast path.

        Return the response to write, or None if the response was streamed.
        """
        try:
            return await self._respond(head, body, transport)
        except Exception:  # an internal error, handled as in `Api.handle`
            log.exception("request_failed", endpoint=head.endpoint)
            headers = answer_headers(head, self.cors)
            return refusal(internal(), headers, messages=head.endpoint == "messages")

    async def _respond(
        self, head: Head, given: bytes | web.BaseRequest, transport: asyncio.Transport | None
    ) -> web.Response | None:
        """Handle a request. `given` is the request's body, or the aiohttp request from which the body is read.

        Return the response to write, or None if the response was streamed.
        """
        headers, arrived = answer_headers(head, self.cors), self.director.now()
        headers[heads.MODE] = "exact"
        model, kind, owner = "", "unary", ""
        error: ApiError | None = None
        try:
            if self.keys is not None:
                owner = self.keys.check(head.credentials)
            # the fast path has already parsed these headers together with the head
            if not isinstance(given, bytes):
                overrides = read_overrides(given.raw_headers, self.director.settings.router)
                asked = heads.read_admission(given.raw_headers) if self._admission.by_deadline else head.asked
                head = msgspec.structs.replace(head, overrides=overrides, asked=asked)
            head, parsed, body = await self._reader.read(head, given)
            if parsed.unknown:
                heads.add_warning(headers, heads.unknown_fields(parsed.unknown))
            kind, model = "stream" if parsed.stream else "unary", parsed.model
            self._counts.active[model] += 1
            self.answering += 1
            if parsed.response is not None:
                parsed = await self.responses.opened(parsed, parsed.response, owner)
            call = heads.Call(headers["X-Request-Id"], head, parsed, headers, arrived, transport)
            try:
                response, error = await self._answer(call)
            except ApiError as refused:
                call.parsed = self._reader.pass_on(head, body, refused)
                response, error = await self._answer(call)
            return response
        except ApiError as raised:
            error = in_terms_of(head.endpoint, raised)
            response = refusal(error, headers, messages=head.endpoint == "messages")
            if not isinstance(given, bytes) and given.content.exception() is not None:
                response.force_close()  # the start of the next request is unknown
            return response
        except asyncio.CancelledError:
            error = ApiError(499, "the client has disconnected", code="cancelled")
            raise
        except Exception:
            error = internal()
            raise
        finally:
            self._count(model, head.endpoint, kind, error)
            # Break the reference cycle with this frame in the error's traceback, which would keep the body until the
            # next garbage collection.
            error = None

    async def _answer(self, call: heads.Call) -> tuple[web.Response | None, ApiError | None]:
        """Admit a request, run it and wait for its end.

        Return the response to write, or None if the response was streamed. Also return the error of a stream that
        failed.
        """
        parsed, headers = call.parsed, call.headers
        stream: SseStream | None = None
        if parsed.stream:
            if call.transport is None:
                raise asyncio.CancelledError
            limits, cut_off = self.director.settings.stream, self.director.metrics.faults.slow_clients
            stream = SseStream(call, call.transport, limits, cut_off)
            self._streams[stream] = None
        try:
            completion, reservation = await self._admit(call, stream)
            error = await self._run(completion, reservation)
        except Exception as why:  # after a cancellation, the server closes the connection itself
            if stream is None or not stream.started:
                raise
            if not isinstance(why, ApiError):
                stream.abort()  # the stream already has data: no HTTP error can follow
                raise
            why = in_terms_of(call.head.endpoint, why)
            stream.end(FORMATS[parsed.api].failure(why, call.id))
            return None, why
        finally:
            if stream is not None:
                self._streams.pop(stream, None)
                if stream.waiting:
                    self._unread[stream] = None
                else:
                    stream.release()
        if stream is not None and (error is None or stream.started):
            return None, error
        if stream is None and completion.answers[0].endpoint is not None:
            headers |= heads.worker_headers(completion.answers)
        if error is not None:
            raise error
        whole = completion.whole()
        return web.Response(
            status=whole.status, body=whole.body, headers=headers | {"Content-Type": whole.media}
        ), None

    async def _admit(self, call: heads.Call, stream: SseStream | None) -> tuple[Completion, Reservation]:
        """Admit a request. Return its answers as a Completion, and its reservation, which is released already.

        The caller sends the answers' requests to workers in the same event-loop iteration. So no queued request can
        take the released room. An answer that has to wait nevertheless reserves the same room again. Raise ApiError if
        the request is refused.
        """
        routing, served, tier = self.director.routing, call.parsed.served, call.head.tier
        if self._admission.by_deadline:
            lineage = self._admission.look(call)
            admitted = await self._admitted(call, lineage)
            # an invalid request must not wait in the queue
            prompts = [(len(prompt), names) for prompt, _, names in admitted.prompts]
            most = max(answer_tokens(call.parsed, tokens, admitted.group) for tokens, _ in prompts)
            reservation, until = await self._admission.enter(call, lineage, prompts, most)
            reservation.free()
            admitted = msgspec.structs.replace(admitted, first_token_by=until)
        else:
            reservation = await self._admission.admit(served, tier)
            try:
                admitted = await self._admitted(call, reservation.lineage)
            finally:
                # released for the answers, which are launched before the next request in the queue
                reservation.free()
        priority = 0 if admitted.first_token_by is None else routing.table.urgency(tier)
        return Completion(admitted, stream, priority, routing.limit(call.parsed.model)), reservation

    async def _admitted(self, call: heads.Call, lineage: Lineage) -> AdmittedRequest:
        """Tokenize a request's prompts and return the admitted request. Raise ApiError if the request is invalid."""
        parsed, director = call.parsed, self.director
        began = director.now()
        try:
            if parsed.proxied is not None:
                group, tokens = director.routing.group(parsed.served, lineage), await self.tokens(BUILTIN)
                return admitted_proxied(call, parsed.proxied, lineage, group, tokens, next(self._serial))
            tokens = await self.tokens_of(parsed.model, lineage)
            group = director.routing.group(parsed.served, lineage)
            if group.text_only:
                refuse_unsupported(parsed, group)
            for field, names in parsed.template_reads.items():
                if tokens.template is not None and not any(map(tokens.template.reads, names)):
                    heads.add_warning(call.headers, heads.no_effect(field))
            formats = self._formats.of(parsed.model, tokens)
            if parsed.tool_use is not None:
                check_formats(parsed.tool_use, formats)
            constraint = None if parsed.guided is None else await self._constraint(parsed.guided, group)
            prompts = await read_prompts(parsed, tokens, group.context_tokens, self.intake)
        except BadTemplate as error:
            raise invalid(str(error), "messages") from error
        except NoWorker as error:  # the last worker of this lineage left while its tokenizer was loaded
            raise self._admission.refusal(error, parsed.served, call.head.tier) from error
        self._tokenizer_ms("encode").note((director.now() - began) * 1000)
        salt = seed(lora=parsed.adapter, namespace=parsed.cache_salt)
        named = [(prompt, text, BlockNames(prompt, salt)) for prompt, text in prompts]
        words = parsed.sampling.bad_words
        bad = tokens.word_tokens(words) if words and group.engine != "openai" else []
        return AdmittedRequest(
            call, lineage, named, group, tokens, formats, constraint, bad, next(self._serial)
        )

    async def _constraint(self, guided: Json, group: EndpointGroup) -> Constraint | None:
        """Return a request's constraint as a grammar. A large one is converted in a thread.

        If no grammar can express the constraint, return None for external servers, which may support it nevertheless.
        Raise ApiError (400) for other engines.
        """
        try:
            return await self.intake.long_texts.read(len(str(guided)), partial(constraint_of, guided))
        except GrammarRefused as refused:
            if group.engine == "openai":
                return None
            raise invalid(str(refused), next(iter(guided))) from refused

    async def _run(self, completion: Completion, room: Reservation) -> ApiError | None:
        """Launch a request's answers and wait for their end. Return the error of the answers, or None if all succeeded.

        The answers are cancelled when the client disconnects.
        """
        if self._over:
            raise shutting_down()
        self.completions[completion] = None
        options = completion.format.parsed.response
        if options is not None:
            self.responses.begin(options, completion)
        try:
            self._driver.launch(completion.answers, completion, room)
            error = await completion.over
        except BaseException:  # whatever the reason, the answers are no longer read
            self._driver.cancel(completion.answers)
            if options is not None:
                self.responses.drop(options)
            raise
        finally:
            del self.completions[completion]
        if options is not None:
            self.responses.end(options, completion, error)
        return error

    async def tokens_of(self, model: str, lineage: Lineage) -> Tokens:
        """Return a model's tokenizer. Raise ApiError (503) if the tokenizer cannot be loaded."""
        try:
            return await self.tokens(lineage[1])
        except TokenizerMissing as error:
            log.error("tokenizer_missing", model=model, why=str(error))
            why = f"the tokenizer of {model} cannot be loaded"
            raise unavailable(why, "tokenizer_missing", TOKENIZER_RETRY_S) from error

    def check(self, now: float) -> None:
        """Disconnect clients that have not read for too long, reload changed API keys, and report unserved models.

        Called every second.
        """
        if self.keys is not None:
            self.keys.refresh()
        self.responses.expire(now)
        self._formats.report_unserved(self.director.table.known, now)
        for stream in [*self._streams, *self._unread]:
            stream.check(now)
        for stream in list(self._streams):
            stream.await_token(now)
        for stream in [stream for stream in self._unread if not stream.waiting]:
            del self._unread[stream]
            stream.release()

    def drain(self) -> None:
        """Stop admitting requests. Requests in progress continue."""
        self._admission.open = False

    def cut_off(self) -> None:
        """Fail all requests in progress, and refuse queued and later requests."""
        self._over = True
        for completion in list(self.completions):
            completion.finish(shutting_down())
            self._driver.cancel(completion.answers)
        self._admission.refuse_all()

    def _count(self, model: str, endpoint: str, kind: str, error: ApiError | None) -> None:
        """Count a request that has ended. `kind` is "stream" or "unary".

        An error after the first token counts as an error, although the HTTP status was 200.
        """
        requests, ended = self._requests, self._counts.ended
        if model:
            self._counts.active[model] -= 1
            self.answering -= 1
        if error is None:
            ended[model, endpoint, kind, "success", ""] += 1
            return
        ended[model, endpoint, kind, "error", error.error_type] += 1
        if error.status == 499:
            requests.cancellations.labels(model, endpoint, kind).inc()
            requests.disconnected.inc()
        elif error.refusal == "overload":
            requests.rejections.labels(model, endpoint).inc()
        elif error.refusal:
            requests.refusals.labels(model, endpoint, error.refusal).inc()


def answer_headers(head: Head, cors: Cors) -> dict[str, str]:
    """Return the headers that every response to this request has."""
    headers = heads.request_ids(head.id, messages=head.endpoint == "messages")
    if head.warning:
        headers["Warning"] = head.warning
    return headers | cors.headers(head.origin)
