"""Client of an OpenAI-compatible server: identity, abilities and completions."""

import asyncio
import contextlib
import json
import secrets
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec

from events.errors import HoldfastError
from events.intrusion.registration import NAME_MAX, NAMES_MAX
from events.wire import Generate, Sampling
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.error_mapping import error_of, error_words
from workers.engines.openai.kv_names import CANARY_SALT
from workers.engines.openai.lineage import merged
from workers.engines.openai.lineage import read as read_lineage
from workers.engines.openai.stream_decoder import Fault, IdsFrom, read_piece
from workers.engines.openai.upstream_errors import HealthAnswer, UpstreamUnavailable, shown, unreachable
from workers.engines.openai.upstream_errors import refused as refused_us

ASK_S_MAX = 5.0  # for requests that need no computation at the upstream
PROBE_S_MAX = 60.0  # for a short completion on a cold server
PROBE_TOKENS = 8
BODY_BYTES_MAX = 4 * 1024 * 1024
CONNECT_S_MAX = 2.0
READ_S_MAX = 600.0  # between two bytes of one stream; the frontend's own limits are far lower
COMPLETIONS = "/v1/completions"
PROMPT_IDS = [1, 2, 3]  # ids that any vocabulary has
STORED_TOKENS = 1024  # longer than any block of a KV cache
WORDS = [
    "river", "seven", "copper", "morning", "engine", "quiet", "ladder", "paper", "north", "falcon", "winter", "table",
]  # fmt: skip
RANK_HEADER = "X-data-parallel-rank"  # vLLM's
CLIENT_MISTAKES = (400, 413, 422)  # statuses that mean, in a probe, that a variant is not supported
NOTHING_ADDED: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,  # vLLM, SGLang and llama-server read this as "all"
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Values that change nothing. Sent with canaries, and with the values that a client gave.

If they were left out, the model's generation_config.json (vLLM, SGLang) or the server's defaults (llama-server) would decide,
and a canary would not be the same everywhere.
"""


class NoHandle(HoldfastError):
    """The upstream server does not hand over this KV cache."""


class NoConnector(NoHandle):
    """The upstream server answers a request for a handle without one, or does not support the request."""


class Upstream:
    """The client of one server."""

    def __init__(self, url: str, key: str, streams_max: int) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self.model = ""  # the first model that the server lists; empty before that is known
        self._session = aiohttp.ClientSession(
            # No connection is reused: llama-server announces keep-alive, but closes each one after a stream.
            connector=aiohttp.TCPConnector(limit=streams_max + 8, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX, sock_read=READ_S_MAX),
        )
        self.use_key(key)

    def use_key(self, key: str) -> None:
        """Use this key from now on; empty: no key."""
        self.key = key
        self._session.headers.pop("Authorization", None)
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self, deadline_s: float) -> HealthAnswer:
        """Check the server's health within `deadline_s` in total."""
        path = ""
        try:
            async with asyncio.timeout(deadline_s):
                for path in ("/health", "/v1/models"):  # not every server has the first
                    async with self._session.get(self._url + path) as response:
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
        """Return the text at /metrics; None if there is no such page, or no answer in time."""
        try:
            async with asyncio.timeout(deadline_s), self._session.get(self._url + "/metrics") as response:
                return None if response.status >= 400 else (await _bounded(response)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def store_something(self, abilities: Abilities) -> None:
        """Have the server compute a prompt that is in no cache and longer than a block. Ignores failures."""
        size = min(STORED_TOKENS, (abilities.context_tokens or STORED_TOKENS) // 2)
        tokens = (PROMPT_IDS * size)[:size]
        request = Generate(0, "probe", tokens, size, Sampling(max_tokens=1), canary=True)
        body = completion(abilities, request) | {"stream": False}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with (
                asyncio.timeout(PROBE_S_MAX),
                self._session.post(self._url + COMPLETIONS, json=body) as response,
            ):
                await _bounded(response)

    async def abilities(self) -> Abilities:
        """Read the server's identity and probe its abilities. Raise UpstreamUnavailable."""
        listed = await self.listed()
        told = merged({}, await read_lineage(self))
        listed = replace(listed, told=tuple((path, one) for path, one in told.items() if one))
        known = await self.probed(replace(listed, version=await self.version() or ""))
        return replace(known, handles=bool(await self.hands_over(known)))

    async def listed(self, wanted: str = "") -> Abilities:
        """Return a model's entry at /v1/models; the first entry if the model is not listed. Raise UpstreamUnavailable."""
        listed = await self._get("/v1/models")
        try:
            every = listed["data"]
            about = next((one for one in every if one["id"] == wanted), None) or every[0]
            self.model = str(about["id"])
            size, root = (about.get("meta") or {}).get("size"), str(about.get("root") or "")
            return Abilities(
                self.model,
                context_tokens=_context(about),
                root=root,
                also_served=_also_served(every, about),
                size=size if isinstance(size, int) else None,
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise UpstreamUnavailable(f"{shown(self._url)}/v1/models lists no model") from None

    async def version(self) -> str | None:
        """Return the version at /version; empty if there is no such page, None if it cannot be read now."""
        said = await self.page("/version")
        return None if said is None else str(said.get("version") or "")

    async def page(self, path: str) -> dict[str, Any] | None:
        """Return a page's JSON object; an empty one if there is no such page, None if it cannot be read now."""
        try:
            async with asyncio.timeout(ASK_S_MAX), self._session.get(self._url + path) as response:
                if response.status >= 400:
                    return {} if response.status < 500 else None
                said = await _bounded_json(response)
                return said if isinstance(said, dict) else {}
        except (aiohttp.ClientError, TimeoutError):
            return None
        except ValueError:
            return {}

    async def probed(
        self, found: Abilities, tokens: int = PROBE_TOKENS, deadline_s: float = PROBE_S_MAX
    ) -> Abilities:
        """Probe a server's abilities by a completion of this many tokens, and return them. Raise UpstreamUnavailable."""
        answer: dict[str, Any] | str = ""
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

    async def _probe(
        self, variant: Abilities, tokens: int, deadline_s: float
    ) -> tuple[dict[str, Any] | str, float]:
        """Request a few tokens in one variant; return the answer, or the text of the server's refusal."""
        sampling = Sampling(max_tokens=tokens, logprobs=1)
        request = Generate(0, "probe", PROMPT_IDS, 3, sampling, prompt_text="One, two, three,")
        body = completion(variant, request)
        body["stream"] = False
        began = asyncio.get_running_loop().time()
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.post(self._url + COMPLETIONS, json=body) as r,
            ):
                said = await _bounded_json(r)
                if r.status in CLIENT_MISTAKES:
                    return error_words(said), 0.0
                if r.status >= 400:
                    words = error_words(said)
                    raise refused_us(self._url, COMPLETIONS, r.status, words, keyed=bool(self.key))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(self._url, COMPLETIONS, error, deadline_s) from error
        return said if isinstance(said, dict) else {}, asyncio.get_running_loop().time() - began

    async def hands_over(self, known: Abilities, deadline_s: float = PROBE_S_MAX) -> bool | None:
        """Return whether the server gives handles to KV caches, by requesting one; None if that cannot be determined now."""
        if not (known.exact and known.extensions and known.version != "unknown"):
            return False
        try:
            await self.handle(known, Generate(0, "probe", PROMPT_IDS, 3, Sampling(max_tokens=1)), deadline_s)
        except NoConnector:
            return False
        except NoHandle:
            return None
        return True

    async def handle(self, abilities: Abilities, request: Generate, deadline_s: float) -> dict[str, Any]:
        """Return a handle to the KV cache of all the request's tokens. Raise NoHandle."""
        sampling = Sampling(max_tokens=1, ignore_eos=True)
        body = completion(abilities, msgspec.structs.replace(request, sampling=sampling))
        body |= {
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.post(
                    self._url + COMPLETIONS, json=body, headers=_headers(abilities, request)
                ) as response,
            ):
                said = await _bounded_json(response)
                if response.status >= 400:
                    kind = NoConnector if response.status in CLIENT_MISTAKES else NoHandle
                    raise kind(f"{self._url} gives no handle: it answers {response.status}")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise NoHandle(f"{self._url} gives no handle: {error or type(error).__name__}") from error
        found = said.get("kv_transfer_params") if isinstance(said, dict) else None
        if not (isinstance(found, dict) and found.get("remote_block_ids")):
            raise NoConnector(f"{self._url} gives no handle: it has no KV connector")
        return found

    async def ask(
        self,
        abilities: Abilities,
        request: Generate,
        more: dict[str, Any],
        bytes_max: int = BODY_BYTES_MAX,
    ) -> tuple[int, bytes]:
        """Return the status and body of an unstreamed completion, with extra fields. Raise UpstreamUnavailable."""
        body = completion(abilities, request) | {"stream": False} | more
        try:
            async with (
                asyncio.timeout(PROBE_S_MAX),
                self._session.post(
                    self._url + COMPLETIONS, json=body, headers=_headers(abilities, request)
                ) as response,
            ):
                return response.status, await _bounded(response, bytes_max)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(self._url, COMPLETIONS, error, PROBE_S_MAX) from error

    async def completed_text(self, abilities: Abilities, more: dict[str, Any]) -> str | None:
        """Return the text of a short completion with extra fields; None if the server rejects them.

        Raise Fault if it fails in another way, UpstreamUnavailable.
        """
        sampling = Sampling(max_tokens=PROBE_TOKENS * 2)
        request = Generate(0, "probe", PROMPT_IDS, 3, sampling, prompt_text="One, two, three,")
        status, body = await self.ask(abilities, request, more)
        if status >= 400:
            if status in CLIENT_MISTAKES:
                return None
            raise Fault(error_of(_json_or(body), status, canary=True))
        try:
            return str(json.loads(body)["choices"][0].get("text") or "")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Fault("engine_error: the upstream answers what is no completion") from None

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ASK_S_MAX), self._session.get(self._url + path) as response:
                if response.status >= 400:
                    raise refused_us(self._url, path, response.status, "", keyed=bool(self.key))
                said = await _bounded_json(response)
                return said if isinstance(said, dict) else {}
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(self._url, path, error, ASK_S_MAX) from error

    def complete(self, abilities: Abilities, request: Generate, handle: dict[str, Any] | None = None) -> Any:
        """Return the context manager of a streamed completion's HTTP response. `handle` names its KV cache elsewhere."""
        body = completion(abilities, request)
        if handle is not None:
            body["kv_transfer_params"] = handle
        return self._session.post(self._url + COMPLETIONS, json=body, headers=_headers(abilities, request))


def _headers(abilities: Abilities, request: Generate) -> dict[str, str]:
    """Return the extra headers of a completion: the client's trace, and the selected DP rank."""
    headers = {"traceparent": request.traceparent} if request.traceparent else {}
    return headers | ({RANK_HEADER: str(request.rank)} if abilities.ranks > 1 else {})


def completion(abilities: Abilities, request: Generate) -> dict[str, Any]:
    """Return the body of a completion request: standard fields, and extensions where they are accepted."""
    sampling, unset = (
        request.sampling,
        frozenset(request.sampling.unset),
    )  # fields that the client omitted are omitted
    body: dict[str, Any] = {
        "model": abilities.model,
        "prompt": request.tokens if abilities.token_prompts else prompt_text(request),
        "max_tokens": sampling.max_tokens,
        **({} if "temperature" in unset else {"temperature": sampling.temperature}),
        "stream": True,
        **(_neutral(unset) if abilities.extensions else {}),
        **(request.guided or {}),
    }
    usual = Sampling(max_tokens=0)
    for name in (
        "min_tokens", "top_p", "top_k", "seed", "ignore_eos", "stop_token_ids",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p",
    ):  # fmt: skip
        if name not in unset and (value := getattr(sampling, name)) != getattr(usual, name):
            body[name] = value
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs or abilities.ids_for(request) == "logprobs":
        body["logprobs"] = max(1, sampling.logprobs)
    if abilities.ids_for(request) == "token_ids":
        body["return_token_ids"] = True
        if sampling.logprobs:
            body["return_tokens_as_token_ids"] = True
    if abilities.extensions and (request.cache_salt or request.canary):
        unique = request.cache_salt or secrets.token_hex(16)
        body["cache_salt"] = CANARY_SALT + unique if request.canary else unique
        if abilities.ids_from == "logprobs":
            body["cache_prompt"] = False  # llama-server has no salts; it then computes the whole prompt
    return body


def _neutral(unset: frozenset[str]) -> dict[str, Any]:
    """Return the neutral sampling values, except those that are left to the server's defaults."""
    if not unset:
        return NOTHING_ADDED
    return {name: value for name, value in NOTHING_ADDED.items() if name not in unset}


def prompt_text(request: Generate) -> str:
    """Return the prompt for an upstream that only accepts text. A canary without text gets words made of its ids."""
    if request.prompt_text or not request.canary:
        return request.prompt_text
    return " ".join(WORDS[token % len(WORDS)] for token in request.tokens)


def hidden(text: str, key: str) -> str:
    """Remove the API key from an upstream's text: some servers quote a key that they do not accept."""
    return text.replace(key, "***") if key else text


async def refusal(response: aiohttp.ClientResponse, *, canary: bool) -> str:
    """Return the error in a response that is not a stream."""
    try:
        async with asyncio.timeout(ASK_S_MAX):
            said = await _bounded_json(response)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        said = "no reason given"
    return error_of(said, response.status, canary=canary)


def refused(body: bytes, status: int) -> str:
    """Return the error for a response with this body to a user's request."""
    return error_of(_json_or(body), status, canary=False)


def _json_or(body: bytes, instead: str = "no reason given") -> Any:
    """Parse a body as JSON; return `instead` if it is invalid."""
    try:
        return json.loads(body)
    except ValueError:
        return instead


async def _bounded_json(response: aiohttp.ClientResponse) -> Any:
    """Read a body as JSON. Raise ValueError if it is invalid or too long."""
    return json.loads(await _bounded(response))


async def _bounded(response: aiohttp.ClientResponse, most: int = BODY_BYTES_MAX) -> bytes:
    """Read a body. Raise ValueError if it is too long."""
    body = await response.content.read(most)
    while not response.content.at_eof():
        if len(body) >= most:
            raise ValueError(f"a body of more than {most} bytes")
        body += await response.content.read(most - len(body))
    return body


def _ids_from(answer: dict[str, Any]) -> IdsFrom:
    """Return which part of an answer contains its token ids."""
    choice = (answer.get("choices") or [{}])[0]
    if choice.get("token_ids"):
        return "token_ids"
    try:
        return "logprobs" if read_piece(choice, "logprobs", 1).tokens else "nowhere"
    except Fault:
        return "nowhere"


def _also_served(every: list[Any], about: dict[str, Any]) -> tuple[str, ...]:
    """Return the other names of a listed model: those with the same root. An adapter, which has a `parent`, is none of them."""
    root, own = about.get("root"), about["id"]
    same = {str(one["id"]) for one in every if root and one.get("root") == root and not one.get("parent")}
    return tuple(sorted(name for name in same - {own} if len(name) <= NAME_MAX))[:NAMES_MAX]


def _context(about: dict[str, Any]) -> int | None:
    meta = about.get("meta") or {}
    found = about.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
    return int(found) if found else None
