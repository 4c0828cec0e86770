"""Sends requests to the upstream and relays the answers.

Two helpers adapt the requests. `Constraints` translates the required form of an answer, such as a JSON schema, into a field that
the upstream obeys. `UpstreamKey` follows changes of the file that contains the API key.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
import structlog

from events.grammar.ebnf import parse_ebnf
from events.grammar.printer import to_gbnf
from events.grammar.refusals import GrammarRefused
from events.process.key_file import read_key
from events.refusal import RequestRefusal, unsupported
from events.wire import Chunk, Generate, Logprob, ProxiedRequest
from workers.engines.engine import lacks_adapter
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.field_probes import FieldProbes, TokenLimitProbes
from workers.engines.openai.identity_watch import IdentityWatch
from workers.engines.openai.pooling import CANARIES, as_answer
from workers.engines.openai.proxy import pieces
from workers.engines.openai.read_pace import ReadPace
from workers.engines.openai.stream_decoder import Fault, JsonObject, UpstreamStream, finite, is_client_error
from workers.engines.openai.upstream import (
    COMPLETIONS,
    PROBE_S_MAX,
    UNAUTHORIZED,
    Handle,
    Upstream,
    UpstreamUnavailable,
    hidden,
    prompt_text,
    refusal,
    refusal_in,
)
from workers.engines.openai.upstream_health import RetryGate

OVERLOADED = "overloaded"
# size of an answer with the logprobs of a prompt: each takes about 80 bytes, and a prompt has at most 100,000 tokens
LOGPROBS_BYTES_MAX = 32 * 1024 * 1024
KEY_EVERY_S = 1.0  # between two reads of the key's file
KEY_READ_S_MAX = 2.0  # a file system that hangs must not delay requests
NOT_SERVED = (404, 405, 501)  # statuses of a server that does not have the path of a proxied request
UNLOADED = (400, 404)  # statuses for an adapter that the server does not have (SGLang, vLLM)
STRANGE = (*UNAUTHORIZED, 404)  # statuses which suggest that another server has replaced the upstream

log = structlog.get_logger(__name__)
Emit = Callable[[list[Chunk]], None]

WORD = "zebra"  # an unlikely answer to the prompt of a probe
Style = Literal["structured_outputs", "guided", "response_format", "grammar", "ebnf", "gbnf"]
GUIDED = "guided_"
KINDS = ("json", "regex", "choice", "grammar")  # kinds of constraints that `guided` supports, too
GRAMMAR = f'root ::= "{WORD}"\n'
SCHEMA = {"name": "probe", "schema": {"type": "string", "enum": [WORD]}}
PROBES: dict[Style, JsonObject] = {
    "structured_outputs": {"structured_outputs": {"choice": [WORD]}},
    "guided": {"guided_choice": [WORD]},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "grammar": {"structured_outputs": {"grammar": GRAMMAR}},  # not every backend of vLLM supports grammars
    "ebnf": {"ebnf": GRAMMAR},  # SGLang
    "gbnf": {"grammar": GRAMMAR},  # llama-server
}
CONTRADICTIONS: dict[Style, JsonObject] = {
    "structured_outputs": {"structured_outputs": {"choice": [WORD], "regex": WORD}},
    "guided": {"guided_choice": [WORD], "guided_regex": WORD},
    "response_format": {"response_format": {"type": WORD}},
    "grammar": {"structured_outputs": {"grammar": GRAMMAR, "regex": WORD}},
    "ebnf": {"ebnf": GRAMMAR, "regex": WORD},
    "gbnf": {"grammar": GRAMMAR, "json_schema": SCHEMA["schema"]},
}


@dataclass(eq=False)
class Constraints:
    """Finds the request field by which a server constrains the form of its answers, for example to a JSON schema.

    Servers use different fields. Some obey `response_format`, `ebnf` (SGLang) or `grammar` (llama-server). vLLM has
    `structured_outputs`, and in earlier versions `guided_choice` and similar fields. A server accepts a request with a
    field that it does not know, and ignores the field. Therefore the fields are probed one after the other, when a request
    first needs a constraint. A probe requests a short completion with a constraint that allows only one word. If the answer is
    that word, the server obeys the field.

    With a reasoning parser, vLLM does not constrain the reasoning, so the answer is not that word. A second probe then sends a
    contradictory constraint. If the server rejects the contradiction, it has read the field, which counts as obeying. vLLM
    rejects a contradiction before the request reaches the engine. A grammar that does not compile is not used as the
    contradiction, because such a grammar terminates the engine of some vLLM versions.
    """

    # returns the text of a short completion with the given fields, or None if the server rejects them
    complete: Callable[[JsonObject], Awaitable[str | None]]
    probes: FieldProbes = field(default_factory=FieldProbes)

    async def translate(self, guided: JsonObject, fallback: JsonObject | None = None) -> JsonObject:
        """Translate a constraint into a request field that the server obeys.

        `guided` is the constraint, as a grammar if a grammar can express it. `fallback` is the client's own constraint, for
        servers that take no grammar. Raise Fault if the server obeys no field that can express the constraint.
        """
        ((field, value),) = guided.items()
        kinds = _kinds(field, value)
        if kinds.keys() == {"grammar"}:
            if await self._obeys("grammar"):
                return {"structured_outputs": kinds}
            if await self._obeys("ebnf"):
                return {"ebnf": kinds["grammar"]}
            if await self._obeys("gbnf"):
                return {"grammar": _as_gbnf(kinds["grammar"])}
            if fallback is not None and not await self._obeys("guided"):
                return await self.translate(fallback)
        if field == "response_format" and await self._obeys("response_format"):
            return guided
        if await self._obeys("structured_outputs"):
            return {"structured_outputs": kinds}
        if kinds.keys() <= set(KINDS) and await self._obeys("guided"):
            return {GUIDED + kind: what for kind, what in kinds.items()}
        if kinds.keys() == {"json"} and await self._obeys("response_format"):
            described = {"name": "answer", "schema": kinds["json"]}
            return {"response_format": {"type": "json_schema", "json_schema": described}}
        raise Fault(unsupported(field, "this model's server does not constrain its answers by it").error)

    async def _obeys(self, style: Style) -> bool:
        return await self.probes.obeys(style, partial(self._probe, style))

    async def _probe(self, style: Style) -> bool:
        """Return whether the server obeys a constraint in the field `style`, or rejects a contradictory one.

        Raise Fault or UpstreamUnavailable if the probe cannot be completed.
        """
        text = await self.complete(PROBES[style])
        if text is None:
            return False
        return text.strip().strip('"') == WORD or await self.complete(CONTRADICTIONS[style]) is None


def _as_gbnf(grammar: object) -> str:
    """Return a grammar in EBNF as GBNF. Raise Fault if GBNF cannot express it."""
    try:
        return to_gbnf(parse_ebnf(str(grammar)))
    except GrammarRefused as refused:
        raise Fault(unsupported("structured_outputs", str(refused)).error) from refused


def _kinds(field: str, value: object) -> JsonObject:
    """Convert a client's constraint to the form of `structured_outputs`: a map from kind (json, regex …) to value."""
    if field.startswith(GUIDED) or not isinstance(value, dict):
        return {field.removeprefix(GUIDED): value}
    if field != "response_format":
        return {kind: what for kind, what in value.items() if what is not None}
    if value["type"] == "json_object":
        return {"json_object": True}
    described = value.get("json_schema")
    return {"json": described.get("schema", {}) if isinstance(described, dict) else {}}


class UpstreamKey:
    """Keeps an upstream's API key equal to the content of a key file. Without a file, the key never changes."""

    def __init__(self, upstream: Upstream, file: Path | None) -> None:
        self._upstream = upstream
        self.file = file
        self._trouble = ""

    def use_file(self, file: Path | None) -> None:
        """Read the key from another file from now on. None: send no key."""
        self.file = file
        if file is None:
            self._upstream.use_key("")

    async def follow(self, every_s: float = KEY_EVERY_S) -> None:
        """Read the key file every `every_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.read()

    async def replaced(self, used: str) -> bool:
        """Re-read the key file. Return whether the key now differs from `used`, the key with which a request failed."""
        await self.read()
        return self._upstream.key != used

    async def read(self) -> None:
        """Read the key file and use its key. An unreadable or partly written file leaves the key unchanged."""
        if self.file is None:
            return
        try:
            async with asyncio.timeout(KEY_READ_S_MAX):
                key = await asyncio.to_thread(read_key, self.file)
        except TimeoutError:
            self._note(f"{self.file} cannot be read within {KEY_READ_S_MAX:g} s")
            return
        except ValueError as error:
            self._note(str(error))
            return
        self._note("")
        if key != self._upstream.key:
            self._upstream.use_key(key)
            log.info("upstream_key_replaced", file=str(self.file))

    def _note(self, trouble: str) -> None:
        """Log why the key file cannot be read, unless the previous read failed for the same reason.

        `trouble` is the reason. It is empty if the file was read.
        """
        if trouble and trouble != self._trouble:
            log.warning("upstream_key_unreadable", reason=trouble, advice="the last good key stays in use")
        self._trouble = trouble


@dataclass(eq=False)
class Exchange:
    """Sends requests to one upstream, and passes the answers to the engine as chunks."""

    upstream: Upstream
    abilities: Abilities
    key: UpstreamKey
    identity: IdentityWatch
    gate: RetryGate
    pace: ReadPace

    def __post_init__(self) -> None:
        completed = partial(self.upstream.completed_text, self.abilities)
        probes = FieldProbes(lambda: self.identity.doubts)
        self._constraints = Constraints(completed, probes)
        self._limits = TokenLimitProbes(self.upstream, self.abilities, probes)

    def use_key_file(self, file: Path | None) -> None:
        """Read the API key from this file from now on. None: send no key."""
        if file != self.key.file:
            self.key.use_file(file)

    async def answer(self, request: Generate, handle: Handle | None, emit: Emit) -> None:
        """Send a request, and pass the chunks of the answer, or of an error, to `emit`.

        If the upstream refuses the request and the API key file has a new key, retry once with that key. `handle` locates the KV
        cache of a request that comes from another server.
        """
        used = self.upstream.key
        error = await self._attempt(request, handle, emit)
        if error is not None and await self.key.replaced(used):
            error = await self._attempt(request, handle, emit)
        if error is not None:
            emit([Chunk(0, [], error=hidden(hidden(error, used), self.upstream.key))])

    async def _attempt(self, request: Generate, handle: Handle | None, emit: Emit) -> str | None:
        """Send a request once, and pass the chunks of the answer to `emit`.

        Return the error if the upstream refuses the request or cannot serve it. Otherwise, return None. If the connection breaks,
        pass an error chunk to `emit` and return None.
        """
        try:
            if request.proxied is not None:
                return await self._pass_on(request, request.proxied, emit)
            return await self._complete(request, handle, emit)
        except Fault as fault:
            return str(fault)
        except (aiohttp.ClientError, OSError, TimeoutError, UpstreamUnavailable) as error:
            self.identity.doubt()  # another server may have replaced the upstream
            route = self.upstream.route
            words = route.tls_trouble(error) or str(error) or type(error).__name__
            self._emit(emit, [Chunk(0, [], error=f"upstream_lost: the upstream's connection broke: {words}")])
        # a bug in this worker; without an error chunk, the caller would wait for ever
        except Exception as error:
            log.exception("request_failed")
            emit([Chunk(0, [], error=f"engine_error: {type(error).__name__} in the worker")])
        return None

    async def _complete(self, request: Generate, handle: Handle | None, emit: Emit) -> str | None:
        """Request a completion. Return the upstream's refusal as an error, or None once the answer has ended."""
        if self.abilities.pooling:
            return await self._pooled(request, emit)
        reading = UpstreamStream(request, self.abilities.ids_for(request))
        if request.guided is not None:
            guided = await self._constraints.translate(request.guided, request.guided_fallback)
            request = msgspec.structs.replace(request, guided=guided)
        await self._limits.check(request.sampling)
        before = await prompt_logprobs(self.upstream, self.abilities, request)
        async with self.upstream.complete(self.abilities, request, handle) as response:
            if response.status != 200:
                gone = await self._adapter_gone(request, response.status)
                return gone or await self._refused(response, canary=request.canary)
            async for data in response.content.iter_any():
                chunks = reading.feed(data)
                self._emit(emit, put_before(chunks, before))
                if reading.over:
                    return None
                if wait_s := self.pace.take(len(data), len(chunks)):
                    await asyncio.sleep(wait_s)
            self._emit(emit, reading.end())
        return None

    async def _pooled(self, request: Generate, emit: Emit) -> str | None:
        """Answer a canary with the numbers that a server without tokens computes. Return the error of another request."""
        path = self.abilities.pooling
        if not request.canary:
            return RequestRefusal(f"this model's server does not serve {COMPLETIONS}", 404).error
        fields = CANARIES[path](self.abilities.model, prompt_text(request))
        status, body = await self.upstream.post(path, fields, PROBE_S_MAX)
        if status != 200:
            return refusal_in(body, status, canary=True)
        self._emit(emit, as_answer(body, request.sampling.max_tokens))
        return None

    async def _pass_on(self, request: Generate, proxied: ProxiedRequest, emit: Emit) -> str | None:
        """Pass a client's HTTP request on. Return the upstream's refusal as an error, or None once the response has ended.

        Client errors are part of the response. If the upstream does not serve the path, the refusal says so.
        """
        async with self.upstream.proxy(self.abilities, request, proxied) as response:
            status = response.status
            if gone := await self._adapter_gone(request, status):
                return gone
            if status >= 400 and not is_client_error(status):
                error = await self._refused(response, canary=False)
                if status in NOT_SERVED and not error.startswith("not_serving"):
                    why = f"this model's server does not serve {proxied.path}"
                    return RequestRefusal(why, 404).error
                return error
            try:
                async for chunk in pieces(proxied, response):
                    emit([chunk])
                    piece = chunk.proxied
                    if (
                        piece
                        and proxied.streamed
                        and (wait_s := self.pace.take(len(piece.body), piece.body.count(b"data:")))
                    ):
                        await asyncio.sleep(wait_s)
            except Fault as fault:  # not returned, because a request with output must not be sent again
                self._emit(emit, [Chunk(0, [], error=str(fault))])
        return None

    async def _adapter_gone(self, request: Generate, status: int) -> str:
        """Return the error for a request that the upstream refuses because it has unloaded the adapter; otherwise empty."""
        if not request.adapter or status not in UNLOADED or await self.identity.lists(request.adapter):
            return ""
        return lacks_adapter(request, self.identity.adapters)

    async def _refused(self, response: aiohttp.ClientResponse, *, canary: bool) -> str:
        """Return the error in a response with an error status.

        If the status suggests that another server has replaced the upstream, re-read the upstream's identity.
        """
        error = await refusal(response, canary=canary)
        if self.gate.refused(response.status, response.headers, canary=canary):
            return f"{OVERLOADED}: {error.partition(': ')[2] or error}"
        if response.status in STRANGE:
            self.identity.distrust()
            if changed := await self.identity.look():
                return f"not_serving: the server behind the worker has changed ({changed})"
        return error

    def _emit(self, emit: Emit, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.error = chunk.error and hidden(chunk.error, self.upstream.key)
        emit(chunks)


class RankedToken(msgspec.Struct):
    """vLLM's record of one candidate token at one position of a prompt. Only the fields that are used here are decoded."""

    logprob: float | None = None
    rank: int | None = None


class EchoedChoice(msgspec.Struct):
    """A choice of a completion response. Only the field that is used here is decoded."""

    prompt_logprobs: list[dict[str, RankedToken] | None] | None = None


class EchoedAnswer(msgspec.Struct):
    """A completion response. Only the field that is used here is decoded."""

    choices: list[EchoedChoice]


async def prompt_logprobs(upstream: Upstream, abilities: Abilities, request: Generate) -> list[Logprob]:
    """Return the logprobs of a request's prompt, or an empty list if the request does not need them.

    vLLM does not stream its `prompt_logprobs`, so they are obtained by a separate request before the answer. That request leaves
    the prompt in vLLM's cache. Raise Fault if the server answers without valid logprobs, and UpstreamUnavailable if it does not
    answer.
    """
    top = request.sampling.prompt_logprobs
    if top is None:
        return []
    sampling = msgspec.structs.replace(request.sampling, max_tokens=1, min_tokens=0, logprobs=0)
    asked = msgspec.structs.replace(request, sampling=sampling)
    status, body = await upstream.ask(abilities, asked, bytes_max=LOGPROBS_BYTES_MAX, prompt_logprobs=top)
    if status >= 400:
        raise Fault(refusal_in(body, status, canary=False))
    return read_prompt_logprobs(body, request.tokens, top)


def read_prompt_logprobs(answer: bytes, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Return the logprob of each prompt token, together with the `top` most likely tokens at the same position.

    The logprob of the first token is 0, because no model output precedes it. Raise Fault if `answer` has no valid logprobs.
    """
    try:
        found = msgspec.json.decode(answer, type=EchoedAnswer).choices[0].prompt_logprobs
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise Fault(f"engine_error: the upstream's logprobs of a prompt cannot be read: {error}") from None
    if found is None:
        raise Fault(unsupported("prompt_logprobs", "this model's server gives no logprobs of a prompt").error)
    if len(found) != len(tokens):
        raise Fault(f"engine_error: of {len(tokens)} tokens the upstream gives the logprobs of {len(found)}")
    later = zip(tokens[1:], found[1:], strict=True)
    return [Logprob(0.0), *(_position(token, ranked or {}, top) for token, ranked in later)]


def _position(token: int, ranked: dict[str, RankedToken], top: int) -> Logprob:
    values = {int(name): finite(one.logprob) for name, one in ranked.items() if name.isdigit()}
    if token not in values:
        raise Fault("engine_error: the upstream does not say how likely a token of the prompt is")
    rank = ranked[str(token)].rank or 0
    return Logprob(values[token], sorted(values.items(), key=lambda pair: -pair[1])[:top], max(0, rank))


def put_before(chunks: list[Chunk], found: list[Logprob]) -> list[Chunk]:
    """Prepend `found`, the prompt's logprobs, to the logprobs of the first chunk with tokens, and return `chunks`.

    Once a chunk has received the prompt's logprobs, `found` is cleared, so that they are delivered only once.
    """
    if not found:
        return chunks
    first = next((chunk for chunk in chunks if chunk.tokens), None)
    if first is not None:
        first.logprobs = [*found, *(first.logprobs or ())]
        found.clear()
    return chunks
