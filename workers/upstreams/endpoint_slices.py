"""Finds the pods of a Kubernetes Service by its EndpointSlices: each ready pod is an upstream.

    list ──▶ watch ── an event ──▶ applied
      ▲        ├── 410 Gone: the version is too old ──▶ list again, at once
      │        └── the stream ends, or fails ──▶ list again, after a back-off
      └─────── the API server does not answer ──▶ the last set stays; the reason is shown

A ready pod gets new requests. A pod that is not ready any more, also if it still serves while it terminates, is removed as an
entry of the file is: its requests in flight finish or move.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from yarl import URL

from events.errors import HoldfastError
from workers.config.upstream_route import UpstreamTls
from workers.config.upstreams import UpstreamEntry
from workers.engines.openai.route import TlsContext
from workers.upstreams.discovery import ADDRESSES_MAX, expanded

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIST_S_MAX = 10.0
WATCH_S = 300  # after which the API server ends a watch
SILENT_S_MAX = 330.0
BODY_BYTES_MAX = 16 * 1024 * 1024
LINE_BYTES_MAX = 1024 * 1024
GONE = 410
WAIT_S_MIN = 1.0
WAIT_S_MAX = 30.0

log = structlog.get_logger(__name__)
Json = dict[str, Any]


class ApiFailed(HoldfastError):
    """The API server cannot be reached, or refuses the request."""


class VersionGone(HoldfastError):
    """The API server does not know the version any more from which the watch should continue."""


@dataclass(eq=False)
class SliceSet:
    """The EndpointSlices of one Service, by the list and the events so far."""

    error: str = "the API server has not answered yet"  # why the set may be outdated; empty: it is not
    version: str = ""  # the last resource version
    _slices: dict[str, frozenset[str]] = field(default_factory=dict)  # ready addresses, by the slice's name

    @property
    def addresses(self) -> list[str]:
        """The addresses of the ready endpoints, sorted."""
        return sorted({address for ready in self._slices.values() for address in ready})[:ADDRESSES_MAX]

    def listed(self, answer: Mapping[str, Any]) -> None:
        """Apply a complete list."""
        self._slices = {item["metadata"]["name"]: _ready(item) for item in answer["items"]}
        self.version, self.error = answer["metadata"]["resourceVersion"], ""

    def event(self, event: Mapping[str, Any]) -> None:
        """Apply an event of the watch. Raise VersionGone if the set must be listed again."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == GONE:
                raise VersionGone
            raise ApiFailed(f"the watch failed: {item.get('message') or item.get('code')}")
        if kind == "DELETED":
            self._slices.pop(item["metadata"]["name"], None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[item["metadata"]["name"]] = _ready(item)
        self.version = item["metadata"]["resourceVersion"]


def _ready(item: Mapping[str, Any]) -> frozenset[str]:
    """Return the addresses of a slice's endpoints that are ready. A missing condition means that an endpoint is ready."""
    found = set()
    for endpoint in item.get("endpoints") or ():
        if (endpoint.get("conditions") or {}).get("ready") is not False:
            found.add(
                str(endpoint["addresses"][0])
            )  # the API guarantees one, and further ones mean the same endpoint
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """Where the API server is, and the folder with the token and the certificates of this pod's service account."""

    url: str
    account: Path = ACCOUNT

    @classmethod
    def of_pod(cls) -> "KubernetesApi":
        """Return the API server of the cluster that this process runs in."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}")


class SliceDiscovery:
    """Follows the EndpointSlices of one entry's Service, and expands the entry to one entry for each ready pod."""

    def __init__(
        self, entry: UpstreamEntry, changed: Callable[[], object], api: KubernetesApi | None = None,
        wait_s: float = WAIT_S_MIN,
    ) -> None:  # fmt: skip
        """Call `changed` whenever the set of addresses has changed. `wait_s` is the shortest time before a list is repeated."""
        self.entry = entry  # as the file lists it now; the host does not change
        self.found = SliceSet()
        self._changed = changed
        self._api = api or KubernetesApi.of_pod()
        self._wait_s = wait_s
        self._tls = TlsContext(UpstreamTls(ca_file=str(self._api.account / "ca.crt")))
        service, _, rest = (URL(entry.url).host or "").partition(".")
        self._service, self._namespace = service, rest.partition(".")[0] or "default"

    @property
    def addresses(self) -> list[str]:
        """The addresses of the ready pods, sorted."""
        return self.found.addresses

    @property
    def error(self) -> str:
        """Why the addresses may be outdated; empty: they are not."""
        return self.found.error

    async def run(self) -> None:
        """List and watch until cancelled."""
        wait_s = self._wait_s
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    await self._list(session)
                    wait_s = self._wait_s
                    async for event in self._events(session):
                        self._apply(event)
                except VersionGone:
                    continue
                except (ApiFailed, aiohttp.ClientError, OSError, TimeoutError) as error:
                    self._note(str(error) or type(error).__name__)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    self._note(
                        f"the API server's answer is no list of EndpointSlices: {type(error).__name__}"
                    )
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, WAIT_S_MAX)

    def entries(self) -> list[UpstreamEntry]:
        """Return one entry for each ready pod, which inherits all fields of the discovered one."""
        return [expanded(self.entry, address) for address in self.found.addresses]

    def _note(self, why: str) -> None:
        if why != self.found.error:
            kept = len(self.found.addresses)
            log.warning("endpoint_slices_unknown", upstream=self.entry.name, reason=why, kept=kept)
        self.found.error = why

    def _apply(self, event: Json | None, listed: Json | None = None) -> None:
        before = self.found.addresses
        if listed is not None:
            self.found.listed(listed)
        elif event is not None:
            self.found.event(event)
        if self.found.addresses != before:
            log.info("upstreams_discovered", upstream=self.entry.name, addresses=self.found.addresses)
            self._changed()

    async def _list(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(LIST_S_MAX), self._get(session) as response:
            await self._check(response)
            body = await response.content.read(BODY_BYTES_MAX)
            while not response.content.at_eof() and len(body) < BODY_BYTES_MAX:
                body += await response.content.read(BODY_BYTES_MAX - len(body))
            self._apply(None, json.loads(body))

    async def _events(self, session: aiohttp.ClientSession) -> AsyncIterator[Json]:
        """Watch from the last version until the API server ends the watch."""
        more = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self.found.version,
            "timeoutSeconds": str(WATCH_S),
        }
        async with self._get(session, **more) as response:
            await self._check(response)
            pending = b""
            async for data in response.content.iter_any():
                *lines, pending = (pending + data).split(b"\n")
                if len(pending) > LINE_BYTES_MAX:
                    raise ApiFailed(f"an event has more than {LINE_BYTES_MAX} bytes")
                for line in filter(None, lines):
                    yield json.loads(line)

    def _get(self, session: aiohttp.ClientSession, **more: str) -> Any:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        labels = {"labelSelector": f"kubernetes.io/service-name={self._service}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=LIST_S_MAX, sock_read=SILENT_S_MAX)
        # the token is read each time, because it is rotated
        headers = {"Authorization": f"Bearer {self._token()}"}
        context = self._tls.current() if self._api.url.startswith("https://") else True
        return session.get(
            f"{self._api.url}{path}", params={**labels, **more}, headers=headers, ssl=context, timeout=timeout
        )

    def _token(self) -> str:
        try:
            return (self._api.account / "token").read_text().strip()
        except OSError as error:
            raise ApiFailed(
                f"{error.filename} cannot be read: {error.strerror}; discover: kubernetes needs a pod with a service account"
            ) from error

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        """Raise VersionGone or ApiFailed for an error status."""
        if response.status == GONE:
            raise VersionGone
        if response.status in (401, 403):
            raise ApiFailed(
                f"the API server answers {response.status}: allow the service account to list and watch endpointslices "
                f"of the namespace {self._namespace}"
            )
        if response.status != 200:
            raise ApiFailed(f"the API server answers {response.status}")
