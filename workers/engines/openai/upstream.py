"""The client of an OpenAI-compatible server: reads its identity and requests completions.

`UpstreamUnavailable.why` never quotes the server's own text, because the text may contain a prompt or the API key.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import aiohttp
import msgspec
from yarl import URL

from events.errors import HoldfastError
from events.proxied_paths import PATHS
from events.wire import Generate, ProxiedRequest, Sampling
from workers.config.upstream_route import UpstreamRoute
from workers.engines.openai import adapters
from workers.engines.openai.capabilities import (
    Abilities,
    Told,
    adapters_of,
    also_served,
    context_of,
    merged,
    told_values,
)
from workers.engines.openai.kv_names import CANARY_SALT
from workers.engines.openai.pooling import pooling_path
from workers.engines.openai.route import RequestRoute, tls_reason
from workers.engines.openai.stream_decoder import (
    Fault,
    IdsFrom,
    JsonObject,
    error_of,
    error_words,
    read_piece,
)
from workers.engines.openai.upstream_health import HealthAnswer

UNAUTHORIZED = (401, 403)
LOADING = 503  # status of servers that are not ready yet (llama-server, SGLang)

ASK_S_MAX = 5.0  # for requests that need no computation at the upstream
PROBE_S_MAX = 60.0  # for a short completion on a cold server
PROBE_TOKENS = 8
BODY_BYTES_MAX = 4 * 1024 * 1024
CONNECT_S_MAX = 2.0
READ_S_MAX = 600.0  # longest pause within a stream; the frontend's own limits are far lower
COMPLETIONS = "/v1/completions"
METRICS = "/metrics"
METRICS_S = 2.0
LINEAGE_PAGES: Mapping[str, tuple[str, ...]] = {
    "/get_model_info": ("weight_version",),
    "/get_server_info": ("quantization", "kv_cache_dtype", "attention_backend"),
}
_CACHE_DTYPE = re.compile(r'^vllm:cache_config_info\{[^\n]*\bcache_dtype="([^"\\\n]*)"', re.MULTILINE)
PROMPT_IDS = [1, 2, 3]  # token ids that every vocabulary has
STORED_TOKENS = 1024  # length of a prompt that fills at least one KV block of any server
WORDS = [
    "river", "seven", "copper", "morning", "engine", "quiet", "ladder", "paper", "north", "falcon", "winter", "table",
]  # fmt: skip
RANK_HEADER = "X-data-parallel-rank"  # vLLM's header that selects the DP rank of a request
# statuses which, in answer to a probe, mean that the probed field is not supported
CLIENT_MISTAKES = (400, 413, 422)
USUAL = Sampling(max_tokens=0)
UNUSUAL = (
    "min_tokens", "top_p", "top_k", "seed", "ignore_eos", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "allowed_token_ids", "bad_words",
)  # fmt: skip
"""Sampling parameters that are sent if they differ from their values in USUAL."""
NOTHING_ADDED: dict[str, object] = {
    "top_p": 1.0,
    "top_k": -1,  # vLLM, SGLang and llama-server read this as "all"
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Neutral values of sampling parameters, which change nothing.

They are sent with canaries, and where a client has set a parameter to its neutral value. If they were left out, the model's
generation_config.json (vLLM, SGLang) or the server's defaults (llama-server) would decide, and a canary would not be the same
everywhere.
"""


Handle = JsonObject
"""An opaque object that locates the KV cache of a request at a vLLM server. It is passed on to another server."""

PendingResponse = contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]


class UpstreamUnavailable(HoldfastError):
    """The upstream server cannot be reached, or does not answer like an OpenAI-compatible server."""

    def __init__(self, why: str, said: str = "") -> None:
        """Create the error.

        The message contains `why` and the server's own text, `said`. The attribute `why` does not include `said`.
        """
        super().__init__(f"{why}: {said}" if said else why)
        self.why = why


def shown(url: str) -> str:
    """Return a server's URL without a user name and password."""
    try:
        return str(URL(url).with_user(None))
    except ValueError:  # the port is not a number, which the attempt to connect reports
        return url.rpartition("@")[2]


def unreachable(url: str, path: str, error: Exception, within_s: float) -> UpstreamUnavailable:
    """Return the error for a request to `path` that raised `error` or got no answer within `within_s` seconds."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamUnavailable(f"cannot connect to {shown(url)} (it does not answer)")
    if isinstance(error, TimeoutError):
        return UpstreamUnavailable(f"{shown(url)}{path} does not answer within {within_s:g} s")
    if tls := tls_reason(error, shown(url)):
        return UpstreamUnavailable(f"cannot connect to {shown(url)}: {tls}")
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return UpstreamUnavailable(f"cannot connect to {shown(url)}: its proxy answers {error.status}")
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return UpstreamUnavailable(f"cannot connect to {shown(url)}: its proxy cannot be reached")
    if isinstance(error, aiohttp.ClientConnectorError):
        number, words = error.os_error.errno or 0, error.os_error.strerror
        why = os.strerror(number) if number > 0 else words or type(error.os_error).__name__
        return UpstreamUnavailable(f"cannot connect to {shown(url)} ({why})")
    return UpstreamUnavailable(f"{shown(url)}{path}: {type(error).__name__}", str(error))


def refused(url: str, path: str, status: int, said: str, *, keyed: bool) -> UpstreamUnavailable:
    """Return the error for a request that was answered with an error status and the server's text `said`.

    `keyed` is true if the request had an API key.
    """
    answers = f"{shown(url)}{path} answers {status}"
    if status in UNAUTHORIZED:
        why = "it does not accept the API key" if keyed else "it requires an API key"
        return UpstreamUnavailable(f"{answers}: {why} (--upstream-key-file)")
    if status == LOADING:
        return UpstreamUnavailable(f"{shown(url)} is loading or overloaded: {path} answers {status}", said)
    return UpstreamUnavailable(answers, said)


class NoHandle(HoldfastError):
    """The upstream server has given no handle to a request's KV cache."""


class NoConnector(NoHandle):
    """The upstream server cannot give handles: it rejects a request for a handle, or its answer contains no handle."""


class Upstream:
    """The HTTP client of one OpenAI-compatible server."""

    def __init__(self, url: str, key: str, streams_max: int, route: UpstreamRoute | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self.route = RequestRoute(shown(self._url), route or UpstreamRoute())  # of all later requests
        self.model = ""  # name of the served model, as last read from /v1/models; empty before the first read
        self._session = aiohttp.ClientSession(
            # No connection is reused, because llama-server announces keep-alive, but closes the connection after a stream.
            connector=aiohttp.TCPConnector(limit=streams_max + 8, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX, sock_read=READ_S_MAX),
        )
        self.use_key(key)

    def use_key(self, key: str) -> None:
        """Send this API key with all later requests; empty: send no key."""
        self.key = key
        self._session.headers.pop("Authorization", None)
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self, deadline_s: float) -> HealthAnswer:
        """Check the server's health by /health or, if the server has no /health, by /v1/models.

        The check takes at most `deadline_s` seconds in total.
        """
        path = ""
        try:
            async with asyncio.timeout(deadline_s):
                for path in ("/health", "/v1/models"):  # not every server has /health
                    async with self._session.get(self._url + path, **self.route.options()) as response:
                        if response.status != 404:
                            bad = response.status >= 400
                            return HealthAnswer(f"{path} answers {response.status}" if bad else "")
        except TimeoutError:
            return HealthAnswer(f"{path} does not answer within {deadline_s:g} s", timed_out=True)
        except (aiohttp.ClientError, OSError) as error:
            return HealthAnswer(
                f"{path} cannot be reached: {unreachable(self._url, path, error, deadline_s).why}"
            )
        return HealthAnswer("it has neither /health nor /v1/models")

    async def metrics(self, deadline_s: float) -> str | None:
        """Return the text of /metrics, or None if the server has no /metrics or does not answer in time."""
        with contextlib.suppress(UpstreamUnavailable):
            status, body = await self._get(METRICS, deadline_s)
            return None if status >= 400 else body.decode(errors="replace")
        return None

    async def store_something(self, abilities: Abilities) -> None:
        """Have the server compute an uncached prompt that fills a KV block, so that the server reports a stored block.

        Failures are ignored.
        """
        size = min(STORED_TOKENS, (abilities.context_tokens or STORED_TOKENS) // 2)
        tokens = (PROMPT_IDS * size)[:size]
        request = Generate(0, "probe", tokens, size, Sampling(max_tokens=1), canary=True)
        with contextlib.suppress(UpstreamUnavailable):
            await self.ask(abilities, request)

    async def abilities(self) -> Abilities:
        """Read the server's identity, probe which API extensions it supports, and return both.

        Raise UpstreamUnavailable if the server cannot be reached, or does not answer like an OpenAI-compatible server.
        """
        listed = await self.listed()
        told = merged({}, await self.read_reported((*LINEAGE_PAGES, METRICS)))
        listed = replace(listed, told={path: one for path, one in told.items() if one})
        listed = replace(listed, version=await self.version() or "", paths=await self.paths())
        known = await self.probed(listed)
        return replace(known, handles=bool(await self.hands_over(known)))

    async def paths(self) -> tuple[str, ...]:
        """Return the paths to which clients' requests can be passed on: those in /openapi.json.

        A server without this document may have any of them, and answers 404 for the others.
        """
        said = await self.page("/openapi.json")
        listed = said.get("paths") if said else None
        return tuple(path for path in PATHS if path in listed) if isinstance(listed, dict) else PATHS

    async def listed(self, wanted: str = "") -> Abilities:
        """Return what /v1/models lists about the model `wanted`, or about the first model if `wanted` is not listed.

        Raise UpstreamUnavailable if /v1/models cannot be read or lists no model.
        """
        status, body = await self._get("/v1/models")
        if status >= 400:
            raise refused(self._url, "/v1/models", status, "", keyed=bool(self.key))
        listed = self._json(body, "/v1/models")
        try:
            every = listed["data"]
            about = next((one for one in every if one["id"] == wanted), None) or every[0]
            self.model = str(about["id"])
            size, root = (about.get("meta") or {}).get("size"), str(about.get("root") or "")
            return Abilities(
                self.model,
                context_tokens=context_of(about),
                root=root,
                also_served=also_served(every, about),
                adapters=adapters_of(every, about),
                lora_path=about.get("owned_by") == "sglang",
                size=size if isinstance(size, int) else None,
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise UpstreamUnavailable(f"{shown(self._url)}/v1/models lists no model") from None

    async def version(self) -> str | None:
        """Return the version that /version reports; empty without /version, None if /version cannot be read now."""
        said = await self.page("/version")
        return None if said is None else str(said.get("version") or "")

    async def page(self, path: str) -> JsonObject | None:
        """Return the JSON object at an HTTP path; empty if there is no object, None if the path cannot be read now."""
        try:
            status, body = await self._get(path)
        except UpstreamUnavailable:
            return None
        if status >= 500:
            return None
        said = _json_or(body) if status < 400 else {}
        return said if isinstance(said, dict) else {}

    async def read_reported(self, pages: Iterable[str]) -> dict[str, Told | None]:
        """Return, for each HTTP path in `pages`, what the server reports there for its lineage.

        The lineage names the server's weights and computation settings. The entry of a path is None if the path cannot be read
        now.
        """
        found: dict[str, Told | None] = {}
        for path in pages:
            if path == METRICS:
                text = await self.metrics(METRICS_S)
                dtype = _CACHE_DTYPE.search(text) if text is not None else None
                found[path] = None if text is None else (("kv_cache_dtype", dtype[1]),) if dtype else ()
                continue
            said = await self.page(path)
            found[path] = None if said is None else told_values(said, LINEAGE_PAGES[path])
        return found

    async def probed(
        self, found: Abilities, tokens: int = PROBE_TOKENS, deadline_s: float = PROBE_S_MAX
    ) -> Abilities:
        """Probe which extensions of OpenAI's API a server supports, by requesting completions of `tokens` tokens.

        Each request uses fewer extensions than the one before, until the server accepts a request. `found` is what is already
        known about the server. Return `found` with the extensions of the accepted request and with the time per token. Raise
        UpstreamUnavailable if no request is accepted.
        """
        answer: JsonObject | str = ""
        if found.paths and COMPLETIONS not in found.paths:
            path = await pooling_path(found.model, found.paths, partial(self.post, deadline_s=deadline_s))
            if not path:
                raise UpstreamUnavailable(
                    f"{shown(self._url)} computes neither tokens nor vectors nor scores"
                )
            return replace(found, version=found.version or "unknown", pooling=path)
        for variant in (
            replace(found, token_prompts=True, extensions=True, ids_from="token_ids"),
            replace(found, token_prompts=True),
            found,
        ):
            answer, took_s = await self._probe(variant, tokens, deadline_s)
            if not isinstance(answer, str):
                return replace(
                    variant,
                    version=found.version or str(answer.get("system_fingerprint") or "unknown"),
                    ids_from=_ids_from(answer),
                    token_ms=max(0.1, took_s * 1e3 / tokens),
                )
        where = f"{shown(self._url)}{COMPLETIONS}"
        raise UpstreamUnavailable(f"{where} completes neither token ids nor text", str(answer))

    async def post(self, path: str, fields: JsonObject, deadline_s: float) -> tuple[int, bytes]:
        """Send a POST request with a JSON body and return the status and body of the answer.

        Raise UpstreamUnavailable if no answer of at most 4 MiB arrives within `deadline_s` seconds.
        """
        asked = self._session.post(self._url + path, json=fields, **self.route.options())
        try:
            async with asyncio.timeout(deadline_s), asked as response:
                return response.status, await _bounded(response)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(self._url, path, error, deadline_s) from error

    async def _probe(
        self, variant: Abilities, tokens: int, deadline_s: float
    ) -> tuple[JsonObject | str, float]:
        """Request a completion of `tokens` tokens, with the API extensions in `variant`.

        Return the answer and its duration in seconds. If the server rejects the request, return the text of the refusal and 0.
        Raise UpstreamUnavailable for other errors.
        """
        sampling = Sampling(max_tokens=tokens, logprobs=1)
        request = Generate(0, "probe", PROMPT_IDS, 3, sampling, prompt_text="One, two, three,")
        began = asyncio.get_running_loop().time()
        status, body = await self.ask(variant, request, deadline_s=deadline_s)
        said = self._json(body, COMPLETIONS)
        if status in CLIENT_MISTAKES:
            return error_words(said), 0.0
        if status >= 400:
            raise refused(self._url, COMPLETIONS, status, error_words(said), keyed=bool(self.key))
        return said if isinstance(said, dict) else {}, asyncio.get_running_loop().time() - began

    async def hands_over(self, known: Abilities, deadline_s: float = PROBE_S_MAX) -> bool | None:
        """Request a KV handle, and return whether the server gives such handles. None if that cannot be determined now.

        By a handle, another server can fetch a request's KV blocks from this server.
        """
        if not (known.exact and known.extensions and known.version != "unknown"):
            return False
        try:
            await self.handle(known, Generate(0, "probe", PROMPT_IDS, 3, Sampling(max_tokens=1)), deadline_s)
        except NoConnector:
            return False
        except NoHandle:
            return None
        return True

    async def handle(self, abilities: Abilities, request: Generate, deadline_s: float) -> Handle:
        """Request and return a handle to the KV cache of all tokens of `request`.

        Raise NoConnector if the server does not support handles, and its base class NoHandle if the request fails for another
        reason.
        """
        request = msgspec.structs.replace(request, sampling=Sampling(max_tokens=1, ignore_eos=True))
        remote = {"do_remote_decode": True, "do_remote_prefill": False}
        try:
            status, body = await self.ask(
                abilities, request, deadline_s=deadline_s, kv_transfer_params=remote
            )
            said = json.loads(body)
        except (UpstreamUnavailable, ValueError) as error:
            raise NoHandle(f"{self._url} gives no handle: {error}") from error
        if status >= 400:
            kind = NoConnector if status in CLIENT_MISTAKES else NoHandle
            raise kind(f"{self._url} gives no handle: it answers {status}")
        found = said.get("kv_transfer_params") if isinstance(said, dict) else None
        if not (isinstance(found, dict) and found.get("remote_block_ids")):
            raise NoConnector(f"{self._url} gives no handle: it has no KV connector")
        return found

    async def ask(
        self,
        abilities: Abilities,
        request: Generate,
        *,
        bytes_max: int = BODY_BYTES_MAX,
        deadline_s: float = PROBE_S_MAX,
        **more: object,
    ) -> tuple[int, bytes]:
        """Request a completion without streaming, with the extra fields `more`, and return the status and body.

        Raise UpstreamUnavailable if no answer of at most `bytes_max` bytes arrives within `deadline_s` seconds.
        """
        fields = completion(abilities, request) | {"stream": False} | more
        try:
            async with asyncio.timeout(deadline_s), self._post(fields, abilities, request) as response:
                return response.status, await _bounded(response, bytes_max)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(self._url, COMPLETIONS, error, deadline_s) from error

    async def completed_text(self, abilities: Abilities, more: JsonObject) -> str | None:
        """Return the text of a short completion with the extra fields `more`, or None if the server rejects them.

        Raise Fault if the server reports another error, and UpstreamUnavailable if it does not answer.
        """
        sampling = Sampling(max_tokens=PROBE_TOKENS * 2)
        request = Generate(0, "probe", PROMPT_IDS, 3, sampling, prompt_text="One, two, three,")
        status, body = await self.ask(abilities, request, **more)
        if status >= 400:
            if status in CLIENT_MISTAKES:
                return None
            raise Fault(refusal_in(body, status, canary=True))
        try:
            return str(json.loads(body)["choices"][0].get("text") or "")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Fault("engine_error: the upstream answers what is no completion") from None

    async def _get(self, path: str, deadline_s: float = ASK_S_MAX) -> tuple[int, bytes]:
        """Send a GET request and return the status and body.

        Raise UpstreamUnavailable if the server does not answer in time, or sends more than 4 MiB.
        """
        try:
            options = self.route.options()
            async with (
                asyncio.timeout(deadline_s),
                self._session.get(self._url + path, **options) as response,
            ):
                return response.status, await _bounded(response)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(self._url, path, error, deadline_s) from error

    def _json(self, body: bytes, path: str) -> JsonObject:
        """Parse the body of the answer to `path` as JSON. Raise UpstreamUnavailable if it is not valid JSON."""
        try:
            said: JsonObject = json.loads(body)
            return said
        except ValueError as error:
            raise unreachable(self._url, path, error, ASK_S_MAX) from error

    def complete(
        self, abilities: Abilities, request: Generate, handle: Handle | None = None
    ) -> PendingResponse:
        """Return a context manager that requests a streamed completion and yields the HTTP response.

        `handle` locates the KV cache of a request that comes from another server. It is None for all other requests.
        """
        more = {} if handle is None else {"kv_transfer_params": handle}
        return self._post(completion(abilities, request) | more, abilities, request)

    def _post(self, fields: JsonObject, abilities: Abilities, request: Generate) -> PendingResponse:
        """Return a context manager that requests a completion with the body `fields` and yields the HTTP response."""
        headers = _request_headers(abilities, request)
        return self._session.post(self._url + COMPLETIONS, json=fields, **self.route.options(headers))

    def proxy(self, abilities: Abilities, request: Generate, proxied: ProxiedRequest) -> PendingResponse:
        """Return a context manager that passes a client's HTTP request on and yields the HTTP response."""
        headers = _request_headers(abilities, request) | {"Content-Type": proxied.media}
        body = adapters.client_body(abilities, request, proxied.body)
        return self._session.post(self._url + proxied.path, data=body, **self.route.options(headers))


def _request_headers(abilities: Abilities, request: Generate) -> dict[str, str]:
    """Return headers with the client's trace and, if the server has several DP ranks, the selected rank."""
    headers = {"traceparent": request.traceparent} if request.traceparent else {}
    if abilities.ranks > 1:
        headers[RANK_HEADER] = str(request.rank)
    return headers


def completion(abilities: Abilities, request: Generate) -> JsonObject:
    """Return the body of a streamed completion request, which uses only extensions of OpenAI's API that the server accepts."""
    sampling, ids_from = request.sampling, abilities.ids_for(request)
    body: JsonObject = {
        **adapters.model_fields(abilities, request),
        "prompt": request.tokens if abilities.token_prompts else prompt_text(request),
        "max_tokens": sampling.max_tokens,
        "stream": True,
        **_sampling_fields(sampling, NOTHING_ADDED if abilities.extensions else {}),
        **(request.guided or {}),
    }
    if sampling.logprobs or ids_from == "logprobs":
        body["logprobs"] = max(1, sampling.logprobs)
    if ids_from == "token_ids":
        body["return_token_ids"] = True
        if sampling.logprobs:
            body["return_tokens_as_token_ids"] = True
    if abilities.extensions and (request.cache_salt or request.canary):
        unique = request.cache_salt or secrets.token_hex(16)
        body["cache_salt"] = CANARY_SALT + unique if request.canary else unique
        if abilities.ids_from == "logprobs":
            # llama-server has no salts; this field makes it compute the whole prompt
            body["cache_prompt"] = False
    return body


def _sampling_fields(sampling: Sampling, neutral: Mapping[str, object]) -> dict[str, object]:
    """Return the sampling parameters to send. Parameters that the client omitted are left to the server's defaults.

    `neutral` maps parameters to neutral values, which change nothing. A parameter with its neutral value is sent only if
    `neutral` contains the parameter. The temperature is an exception: it is sent with any value.
    """
    given = {name: getattr(sampling, name) for name in UNUSUAL}
    unusual = {name: value for name, value in given.items() if value != getattr(USUAL, name)}
    chosen = {"temperature": sampling.temperature, **neutral, **unusual}
    fields = {name: value for name, value in chosen.items() if name not in sampling.unset}
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return fields


def prompt_text(request: Generate) -> str:
    """Return the prompt for an upstream that only accepts text; empty if the request has token ids only.

    A canary without text gets a text of words that are selected by its token ids.
    """
    if request.prompt_text or not request.canary:
        return request.prompt_text
    return " ".join(WORDS[token % len(WORDS)] for token in request.tokens)


def hidden(text: str, key: str) -> str:
    """Mask the API key in an upstream's text, because some servers quote a key that they do not accept."""
    return text.replace(key, "***") if key else text


async def refusal(response: aiohttp.ClientResponse, *, canary: bool) -> str:
    """Convert an HTTP response with an error status to the text for a chunk's `error` field, and return the text."""
    try:
        async with asyncio.timeout(ASK_S_MAX):
            body = await _bounded(response)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        body = b""
    return refusal_in(body, response.status, canary=canary)


def refusal_in(body: bytes, status: int, *, canary: bool) -> str:
    """Convert the body of a response with the error status `status` to the text for a chunk's `error` field."""
    return error_of(_json_or(body), status, canary=canary)


def _json_or(body: bytes) -> object:
    """Return the JSON value of a body, or the text "no reason given" if the body is not JSON."""
    with contextlib.suppress(ValueError):
        said: object = json.loads(body)
        return said
    return "no reason given"


async def _bounded(response: aiohttp.ClientResponse, most: int = BODY_BYTES_MAX) -> bytes:
    """Read and return the body of a response. Raise ValueError if the body has more than `most` bytes."""
    body = await response.content.read(most)
    while not response.content.at_eof():
        if len(body) >= most:
            raise ValueError(f"a body of more than {most} bytes")
        body += await response.content.read(most - len(body))
    return body


def _ids_from(answer: JsonObject) -> IdsFrom:
    """Return which part of a completion contains its token ids; "nowhere" if no part does."""
    choice = (answer.get("choices") or [{}])[0]
    if choice.get("token_ids"):
        return "token_ids"
    try:
        return "logprobs" if read_piece(choice, "logprobs", 1).tokens else "nowhere"
    except Fault:
        return "nowhere"
