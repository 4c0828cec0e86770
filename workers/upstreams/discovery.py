"""Finds the servers behind a DNS name: each address is an upstream of its own.

    resolve every 5 s ── new address ──▶ added
              ├── an address is missing in 3 answers in a row ──▶ removed
              └── no answer, or an empty one ──▶ the last set stays; the reason is shown

Some DNS servers answer with a part of a large set, in rotation, so a missing address is not removed at once.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from msgspec.structs import replace
from yarl import URL

from workers.config.upstreams import UpstreamEntry

RESOLVE_EVERY_S = 5.0
RESOLVE_S_MAX = 5.0
MISSING_ANSWERS = 3
ADDRESSES_MAX = 256

log = structlog.get_logger(__name__)
Resolve = Callable[[str], Awaitable[Collection[str]]]
"""Returns the addresses of a host name. Raises OSError if the name cannot be resolved."""


@dataclass(eq=False)
class AddressSet:
    """The addresses of one name, by the answers so far."""

    error: str = ""  # why the last attempt failed; empty: it did not
    _missing: dict[str, int] = field(
        default_factory=dict
    )  # by address: number of answers in a row without it

    @property
    def addresses(self) -> list[str]:
        """The addresses, sorted."""
        return sorted(self._missing)

    def answered(self, found: Collection[str]) -> bool:
        """Apply an answer. Return whether the set has changed."""
        if not found:
            self.error = "the answer has no address"
            return False
        before, self.error = self.addresses, ""
        for address in before:
            self._missing[address] = 0 if address in found else self._missing[address] + 1
        self._missing = {one: missing for one, missing in self._missing.items() if missing < MISSING_ANSWERS}
        for address in sorted(found):
            if len(self._missing) < ADDRESSES_MAX:
                self._missing.setdefault(address, 0)
        return self.addresses != before

    def failed(self, why: str) -> None:
        """Keep the set, because the name could not be resolved for the reason `why`."""
        self.error = why


async def resolve(host: str) -> Collection[str]:
    """Return the IPv4 and IPv6 addresses of a host name. Raise OSError if the name cannot be resolved."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


class DnsDiscovery:
    """Resolves the host of one entry repeatedly, and expands the entry to one entry for each address."""

    def __init__(
        self, entry: UpstreamEntry, changed: Callable[[], object], resolve: Resolve = resolve,
        every_s: float = RESOLVE_EVERY_S,
    ) -> None:  # fmt: skip
        """Call `changed` whenever the set of addresses has changed."""
        self.entry = entry  # as the file lists it now; the host does not change
        self.found = AddressSet()
        self._changed = changed
        self._resolve = resolve
        self._every_s = every_s

    @property
    def addresses(self) -> list[str]:
        """The addresses that were found last, sorted."""
        return self.found.addresses

    @property
    def error(self) -> str:
        """Why the name is not resolved now; empty: it is."""
        return self.found.error

    async def run(self) -> None:
        """Resolve until cancelled."""
        host = URL(self.entry.url).host or ""
        while True:
            before = self.found.error
            try:
                async with asyncio.timeout(RESOLVE_S_MAX):
                    found = await self._resolve(host)
            except TimeoutError:
                self.found.failed(f"{host} is not resolved within {RESOLVE_S_MAX:g} s")
            except (OSError, UnicodeError) as error:
                self.found.failed(f"{host} cannot be resolved: {getattr(error, 'strerror', None) or error}")
            else:
                if self.found.answered(found):
                    log.info("upstreams_discovered", upstream=self.entry.name, addresses=self.found.addresses)
                    self._changed()
            if self.found.error and self.found.error != before:
                kept = len(self.found.addresses)
                log.warning(
                    "upstream_name_unresolved", upstream=self.entry.name, reason=self.found.error, kept=kept
                )
            await asyncio.sleep(self._every_s)

    def entries(self) -> list[UpstreamEntry]:
        """Return one entry for each address, which inherits all fields of the discovered one."""
        return [expanded(self.entry, address) for address in self.found.addresses]


class Discovery(Protocol):
    """Finds the servers of one entry of the file."""

    entry: UpstreamEntry  # as the file lists it now

    @property
    def addresses(self) -> list[str]:
        """The addresses that were found last, sorted."""

    @property
    def error(self) -> str:
        """Why the addresses may be outdated; empty: they are not."""

    async def run(self) -> None:
        """Search until cancelled."""

    def entries(self) -> list[UpstreamEntry]:
        """Return one entry for each address."""


def expanded(entry: UpstreamEntry, address: str) -> UpstreamEntry:
    """Return the entry of one address of a discovered entry. Its certificate must be for the name that was resolved."""
    url = URL(entry.url)
    tls = entry.tls
    if url.scheme == "https" and not tls.server_name:
        tls = replace(tls, server_name=url.host or "")
    name = f"{entry.name}-{address.replace('.', '-').replace(':', '-').replace('%', '-')}"
    return replace(entry, name=name, url=str(url.with_host(address)), tls=tls, discover="")


def merged(listed: Sequence[UpstreamEntry], discovered: Sequence[UpstreamEntry]) -> list[UpstreamEntry]:
    """Return all entries. A listed entry wins over a discovered one of the same name or URL."""
    own = [entry for entry in listed if not entry.discover]
    names, urls = {entry.name for entry in own}, {entry.url for entry in own}
    for entry in discovered:
        if entry.name not in names and entry.url not in urls:
            names.add(entry.name)
            urls.add(entry.url)
            own.append(entry)
    return own
