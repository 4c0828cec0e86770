"""Scales a model's workers by reading and setting the replicas of a Kubernetes scale subresource.

    GET   …/deployments/llama/scale  ─▶ {"kind": "Scale", "metadata": {"resourceVersion": "7"}, "spec": {"replicas": 2}}
    PATCH …/deployments/llama/scale  ◀─ {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 4}}

The PATCH contains the version that was read, so that it cannot undo a concurrent change. After such a change, the server answers
409, and the planner reads the new number before it proposes again.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import aiohttp
from yarl import URL

from controller.adapters.scaling.one_line import one_line
from controller.ports import HookResult, ScaleRequest
from events.errors import BadSetting, HoldfastError

TIMEOUT_S = 10.0  # for both requests
BODY_MAX = 256 * 1024  # bytes; a Scale object has about a thousand
TOKEN_MAX = 64 * 1024  # bytes
MERGE = "application/merge-patch+json"
PLACE = "{model}"


class ScaleRefused(HoldfastError):
    """The server did not scale; the text gives the reason."""


class ScaleSeen(NamedTuple):
    """The contents of a scale subresource."""

    replicas: int
    version: str  # the resourceVersion; empty if the server sends none


class HttpScaleHook:
    """The scaling hook that sets the replicas of one scale subresource, or of one for each model."""

    by = "http"

    def __init__(
        self,
        url: str,
        *,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Check the URL of the scale subresource. Raise BadSetting if it is invalid or `timeout_s` is not positive.

        `{model}` in the URL is replaced by the model's name, percent-encoded. The token and CA files are read at each call,
        because they may be rotated.
        """
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            good = False
        if not good or PLACE in parts.netloc or parts.username is not None:
            raise BadSetting(
                f"{url!r} is not the URL of a scale subresource, such as https://host/apis/apps/v1/…/{PLACE}/scale"
            )
        if not timeout_s > 0:
            raise BadSetting(f"the timeout of a scale subresource must be above 0 s, not {timeout_s:g} s")
        self._url = url
        self._token_file = token_file
        self._ca_file = ca_file
        self._timeout_s = timeout_s

    async def scale(self, wanted: ScaleRequest) -> HookResult:
        """Read the number of replicas, and set it to `wanted.after` if it differs. A failure is returned, not raised."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._scale_once(wanted)
        except TimeoutError:
            return HookResult(False, f"no answer within {self._timeout_s:g} s")
        except ScaleRefused as error:
            return HookResult(False, one_line(str(error)))
        # ValueError: a value that cannot be put into a header
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return HookResult(False, one_line(f"request failed: {str(error) or type(error).__name__}"))

    async def _scale_once(self, wanted: ScaleRequest) -> HookResult:
        url = URL(self._url.replace(PLACE, quote(wanted.model, safe="")), encoded=True)
        headers = await asyncio.to_thread(self._headers)
        trust = await asyncio.to_thread(self._trust) if url.scheme == "https" else True
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trust, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),  # the timeout of `scale` covers both requests
            auto_decompress=False,  # a small compressed answer could become very large
        ) as session:
            seen = _scale(await _request(session, "GET", url))
            if seen.replicas == wanted.after:
                return HookResult(True, f"already {_replicas(wanted.after)}")
            change: dict[str, object] = {"spec": {"replicas": wanted.after}}
            if seen.version:
                change["metadata"] = {"resourceVersion": seen.version}
            await _request(session, "PATCH", url, change)
        return HookResult(True, f"{seen.replicas} → {_replicas(wanted.after)}")

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._token_file is not None:
            try:
                with self._token_file.open("rb") as file:
                    token = file.read(TOKEN_MAX).strip().decode("ascii")
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is not ASCII"
                raise ScaleRefused(f"the token file {self._token_file} cannot be read: {why}") from error
            if not token or not token.isprintable():
                raise ScaleRefused(f"the token file {self._token_file} contains no token")
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _trust(self) -> ssl.SSLContext:
        """Return a TLS context that trusts the CA file, or the system's CAs. Raise ScaleRefused if the file is invalid.

        aiohttp's own context is not used, because it is created at import and may trust no CA.
        """
        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:  # as SSLError is
            raise ScaleRefused(f"the CA file {self._ca_file} cannot be read: {error.strerror}") from error


async def _request(session: aiohttp.ClientSession, method: str, url: URL, change: object = None) -> bytes:
    """Send a request and return the body of the answer.

    Raise ScaleRefused for a status other than 2xx. Errors of aiohttp are raised unchanged.
    """
    body = None if change is None else json.dumps(change).encode()
    headers = {} if change is None else {"Content-Type": MERGE}
    async with session.request(method, url, data=body, headers=headers, allow_redirects=False) as answer:
        found = bytearray()
        async for piece in answer.content.iter_any():
            found += piece
            if len(found) > BODY_MAX:
                raise ScaleRefused(f"HTTP {answer.status}: an answer of more than {BODY_MAX // 1024} KiB")
        if not 200 <= answer.status < 300:
            why = (
                _message(bytes(found)) or answer.headers.get("Location") or answer.reason or "no reason given"
            )
            raise ScaleRefused(f"HTTP {answer.status}: {why}")
        return bytes(found)


def _parsed(body: bytes) -> Mapping[str, Any] | None:
    """Parse a body as a JSON object; None if it is not a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):  # RecursionError: deeply nested brackets
        found = json.loads(body)
        return found if isinstance(found, dict) else None
    return None


def _message(body: bytes) -> str:
    """Return the message of a Kubernetes Status object; empty if the body is not such an object."""
    said = (_parsed(body) or {}).get("message")
    return said if isinstance(said, str) else ""


def _scale(body: bytes) -> ScaleSeen:
    """Return the contents of a Kubernetes Scale object. Raise ScaleRefused if the body is not such an object."""
    found = _parsed(body) or {}
    spec, metadata = found.get("spec") or {}, found.get("metadata") or {}
    if found.get("kind") != "Scale" or not isinstance(spec, dict) or not isinstance(metadata, dict):
        raise ScaleRefused("the answer is not a Scale (autoscaling/v1)")
    replicas = spec.get("replicas", 0)  # Kubernetes leaves a zero out
    version = metadata.get("resourceVersion", "")
    if not isinstance(replicas, int) or isinstance(replicas, bool) or not isinstance(version, str):
        raise ScaleRefused(f"a Scale with {replicas!r} replicas of the version {version!r}")
    return ScaleSeen(replicas, version)


def _replicas(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"
