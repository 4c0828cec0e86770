"""Sends requests to the upstream and relays the answers.

Two helpers adapt the requests: `Constraints` translates a required form of the answer, and `UpstreamKey` follows the API key
file.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
import structlog

from events.process.key_file import read_key
from events.refusal import unsupported
from events.wire import Chunk, Generate, Logprob
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.identity_watch import IdentityWatch
from workers.engines.openai.stream_decoder import Fault, JsonObject, UpstreamStream, finite
from workers.engines.openai.upstream import (
    UNAUTHORIZED,
    Handle,
    Upstream,
    UpstreamUnavailable,
    hidden,
    refusal,
    refusal_in,
)
from workers.engines.openai.upstream_health import RetryGate

OVERLOADED = "overloaded"
# size of an answer with the logprobs of a prompt: each takes about 80 bytes, and a prompt has at most 100,000 tokens
LOGPROBS_BYTES_MAX = 32 * 1024 * 1024
KEY_EVERY_S = 1.0  # between two reads of the key's file
KEY_READ_S_MAX = 2.0  # a file system that hangs must not delay requests
STRANGE = (*UNAUTHORIZED, 404)  # statuses which suggest that another server has replaced the upstream

log = structlog.get_logger(__name__)
Emit = Callable[[list[Chunk]], None]

WORD = "zebra"  # an unlikely answer to the prompt of a probe
Style = Literal["structured_outputs", "guided", "response_format"]
GUIDED = "guided_"
KINDS = ("json", "regex", "choice", "grammar")  # kinds of constraints that `guided` supports, too
SCHEMA = {"name": "probe", "schema": {"type": "string", "enum": [WORD]}}
PROBES: dict[Style, JsonObject] = {
    "structured_outputs": {"structured_outputs": {"choice": [WORD]}},
    "guided": {"guided_choice": [WORD]},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
}
CONTRADICTIONS: dict[Style, JsonObject] = {
    "structured_outputs": {"structured_outputs": {"choice": [WORD], "regex": WORD}},
    "guided": {"guided_choice": [WORD], "guided_regex": WORD},
    "response_format": {"response_format": {"type": WORD}},
}
REPEAT_S_MIN = 10.0
REPEAT_S_MAX = 900.0


@dataclass(slots=True)
class Failed:
    """The schedule for the repetition of a failed probe."""

    again_at: float  # time of the repetition; loop seconds
    wait_s: float  # seconds between the failure and the repetition


@dataclass(frozen=True, slots=True)
class Obeyed:
    """The conditions under which a successful probe stays valid."""

    until: float  # time of its expiry; loop seconds
    doubts: int  # the upstream's doubt count at the probe; the probe is invalid when the count has changed


class Constraints:
    """Finds out which request field makes a server constrain the form of its answers, such as to a JSON schema.

    Servers use different fields: `response_format`, and in vLLM first `guided_choice` and similar fields, later
    `structured_outputs`. A server ignores a field that it does not know, so it proves nothing that a request was accepted. When a
    request first needs a constraint, a probe requests a short completion with each field until one works. The probe's constraint
    allows only one word. If the answer is that word, the field works.

    With a reasoning parser, vLLM does not constrain the reasoning, so the answer is not that word. Therefore a field also counts
    as working if the server rejects a contradictory constraint. The contradiction is one that the server rejects before it
    reaches the engine, because in some versions, a grammar that does not compile terminates vLLM's engine.

    A failed probe is repeated after 10 s, and the wait doubles after each failure, up to 15 min. A successful probe is repeated
    after 15 min. It is repeated earlier if another server may have replaced the upstream, that is, after 401, 403, 404 or a
    broken connection.
    """

    def __init__(
        self,
        complete: Callable[[JsonObject], Awaitable[str | None]],
        doubts: Callable[[], int] = lambda: 0,
    ) -> None:
        """Probe by means of two functions.

        Args:
            complete: returns the text of a short completion with the given fields, or None if the server rejects them.
            doubts: returns how often the upstream has behaved like another server.
        """
        self._complete = complete
        self._doubts = doubts
        self._obeyed: dict[Style, Obeyed] = {}
        self._failed: dict[Style, Failed] = {}
        self._probing = asyncio.Lock()

    async def translate(self, guided: JsonObject) -> JsonObject:
        """Translate a client's constraint into a request field that the server obeys.

        Raise Fault if the server obeys no field that can express the constraint.
        """
        ((field, value),) = guided.items()
        kinds = _kinds(field, value)
        if field == "response_format" and await self._obeys("response_format"):
            return guided
        if await self._obeys("structured_outputs"):
            return {"structured_outputs": kinds}
        if kinds.keys() <= set(KINDS) and await self._obeys("guided"):
            return {GUIDED + kind: what for kind, what in kinds.items()}
        raise Fault(unsupported(field, "this model's server does not constrain its answers by it").error)

    async def _obeys(self, style: Style) -> bool:
        async with self._probing:
            now, failed = asyncio.get_running_loop().time(), self._failed.get(style)
            obeyed, doubts = self._obeyed.get(style), self._doubts()
            if obeyed is not None and now < obeyed.until and doubts == obeyed.doubts:
                return True
            if failed is not None and now < failed.again_at:
                return False
            if await self._probe(style):
                self._obeyed[style] = Obeyed(now + REPEAT_S_MAX, doubts)
                self._failed.pop(style, None)
                return True
            self._obeyed.pop(style, None)
            wait_s = REPEAT_S_MIN if failed is None else min(2 * failed.wait_s, REPEAT_S_MAX)
            self._failed[style] = Failed(now + wait_s, wait_s)
            return False

    async def _probe(self, style: Style) -> bool:
        """Return whether the server obeys the field of this style, or at least rejects a contradictory value.

        Raise Fault or UpstreamUnavailable if the probe cannot be completed.
        """
        text = await self._complete(PROBES[style])
        if text is None:
            return False
        return text.strip().strip('"') == WORD or await self._complete(CONTRADICTIONS[style]) is None


def _kinds(field: str, value: object) -> JsonObject:
    """Return the constraint in a client's field in the form of `structured_outputs`, which maps each kind to its value."""
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
        self._file = file
        self._trouble = ""

    async def follow(self, every_s: float = KEY_EVERY_S) -> None:
        """Read the file every `every_s` seconds until cancelled. Return at once if there is no file."""
        while self._file is not None:
            await asyncio.sleep(every_s)
            await self.read()

    async def replaced(self, used: str) -> bool:
        """Re-read the file. Return whether the key now differs from `used`, the key with which a request failed."""
        await self.read()
        return self._upstream.key != used

    async def read(self) -> None:
        """Read the file and use its key. An unreadable or partly written file leaves the key unchanged."""
        if self._file is None:
            return
        try:
            async with asyncio.timeout(KEY_READ_S_MAX):
                key = await asyncio.to_thread(read_key, self._file)
        except TimeoutError:
            self._note(f"{self._file} cannot be read within {KEY_READ_S_MAX:g} s")
            return
        except ValueError as error:
            self._note(str(error))
            return
        self._note("")
        if key != self._upstream.key:
            self._upstream.use_key(key)
            log.info("upstream_key_replaced", file=str(self._file))

    def _note(self, trouble: str) -> None:
        """Log the reason why the file cannot be read, unless the previous read failed for the same reason. Empty: no error."""
        if trouble and trouble != self._trouble:
            log.warning("upstream_key_unreadable", reason=trouble, advice="the last good key stays in use")
        self._trouble = trouble


class Exchange:
    """Sends requests to one upstream, and passes the answers to the engine as chunks."""

    def __init__(
        self,
        upstream: Upstream,
        abilities: Abilities,
        key: UpstreamKey,
        identity: IdentityWatch,
        gate: RetryGate,
    ) -> None:
        self._upstream = upstream
        self._abilities = abilities
        self._key = key
        self._identity = identity
        self._gate = gate
        self._constraints = Constraints(partial(upstream.completed_text, abilities), lambda: identity.doubts)

    async def answer(self, request: Generate, handle: Handle | None, emit: Emit) -> None:
        """Send a request, and pass the chunks of the answer, or of an error, to `emit`.

        If the upstream refuses the request and the API key file has a new key, retry once with that key. `handle` locates the KV
        cache of a request that comes from another server.
        """
        used = self._upstream.key
        error = await self._attempt(request, handle, emit)
        if error is not None and await self._key.replaced(used):
            error = await self._attempt(request, handle, emit)
        if error is not None:
            emit([Chunk(0, [], error=hidden(hidden(error, used), self._upstream.key))])

    async def _attempt(self, request: Generate, handle: Handle | None, emit: Emit) -> str | None:
        """Send a request once, and pass the chunks of the answer to `emit`.

        Return the error if the upstream refused the request, or cannot serve it. Otherwise return None. A broken connection is
        passed to `emit` as a chunk, too.
        """
        reading = UpstreamStream(request, self._abilities.ids_for(request))
        try:
            if request.guided is not None:
                guided = await self._constraints.translate(request.guided)
                request = msgspec.structs.replace(request, guided=guided)
            before = await prompt_logprobs(self._upstream, self._abilities, request)
            async with self._upstream.complete(self._abilities, request, handle) as response:
                if response.status != 200:
                    return await self._refused(response, canary=request.canary)
                async for data in response.content.iter_any():
                    self._emit(emit, put_before(reading.feed(data), before))
                    if reading.over:
                        return None
                self._emit(emit, reading.end())
        except Fault as fault:
            return str(fault)
        except (aiohttp.ClientError, OSError, TimeoutError, UpstreamUnavailable) as error:
            self._identity.doubt()  # another server may have replaced the upstream
            words = str(error) or type(error).__name__
            self._emit(emit, [Chunk(0, [], error=f"upstream_lost: the upstream's connection broke: {words}")])
        except (
            Exception
        ) as error:  # a bug in this worker; without an error chunk, the caller would wait for ever
            log.exception("request_failed")
            emit([Chunk(0, [], error=f"engine_error: {type(error).__name__} in the worker")])
        return None

    async def _refused(self, response: aiohttp.ClientResponse, *, canary: bool) -> str:
        """Return the error in a response with an error status.

        If the status suggests that another server has replaced the upstream, re-read the upstream's identity.
        """
        error = await refusal(response, canary=canary)
        if self._gate.refused(response.status, response.headers, canary=canary):
            return f"{OVERLOADED}: {error.partition(': ')[2] or error}"
        if response.status in STRANGE:
            self._identity.distrust()
            if changed := await self._identity.look():
                return f"not_serving: the server behind the worker has changed ({changed})"
        return error

    def _emit(self, emit: Emit, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.error = chunk.error and hidden(chunk.error, self._upstream.key)
        emit(chunks)


class RankedToken(msgspec.Struct):
    """vLLM's record of one candidate token at one position of a prompt. Only the field that is used here is decoded."""

    logprob: float | None = None


class EchoedChoice(msgspec.Struct):
    """A choice of a completion response. Only the field that is used here is decoded."""

    prompt_logprobs: list[dict[str, RankedToken] | None] | None = None


class EchoedAnswer(msgspec.Struct):
    """A completion response. Only the field that is used here is decoded."""

    choices: list[EchoedChoice]


async def prompt_logprobs(upstream: Upstream, abilities: Abilities, request: Generate) -> list[Logprob]:
    """Return the logprobs of a request's prompt, or an empty list if the request does not need them.

    vLLM does not stream its `prompt_logprobs`, so they are obtained by a separate request before the answer. That request leaves
    the prompt in vLLM's cache. Raise Fault or UpstreamUnavailable.
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
    """Return the logprob of each token of a prompt, with the `top` best tokens at its position.

    The logprob of the first token is 0, because no model output precedes it. Raise Fault if `answer` has no valid logprobs.
    """
    try:
        found = msgspec.json.decode(answer, type=EchoedAnswer).choices[0].prompt_logprobs
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise Fault(f"engine_error: the upstream's logprobs of a prompt cannot be read: {error}") from None
    if found is None:
        raise Fault(unsupported("echo", "this model's server gives no logprobs of a prompt").error)
    if len(found) != len(tokens):
        raise Fault(f"engine_error: of {len(tokens)} tokens the upstream gives the logprobs of {len(found)}")
    later = zip(tokens[1:], found[1:], strict=True)
    return [Logprob(0.0), *(_position(token, ranked or {}, top) for token, ranked in later)]


def _position(token: int, ranked: dict[str, RankedToken], top: int) -> Logprob:
    values = {int(name): finite(one.logprob) for name, one in ranked.items() if name.isdigit()}
    if token not in values:
        raise Fault("engine_error: the upstream does not say how likely a token of the prompt is")
    return Logprob(values[token], sorted(values.items(), key=lambda pair: -pair[1])[:top])


def put_before(chunks: list[Chunk], found: list[Logprob]) -> list[Chunk]:
    """Prepend the prompt's logprobs, `found`, to those of the first chunk with tokens, and return `chunks`.

    `found` is then cleared, so that the logprobs are delivered once.
    """
    if not found:
        return chunks
    first = next((chunk for chunk in chunks if chunk.tokens), None)
    if first is not None:
        first.logprobs = [*found, *(first.logprobs or ())]
        found.clear()
    return chunks
