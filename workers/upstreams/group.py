"""Runs the workers of all upstreams of one process, as a watched file lists them.

The upstreams share the process: its event loop, its admin port, its keeper and its descriptors. Each has its own worker with its
own broker account and connection, instance, port, HTTP client and spool, so it joins, is probed, is convicted and leaves alone.
Only a failure of the process itself ends all of them: SIGKILL, or an error in a callback of the event loop.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import overload

import structlog

from events.journal.counters import JournalCounters
from events.json_types import Json
from workers.config.upstreams import UpstreamEntry
from workers.exits import BROKE
from workers.shutdown import CLEANUP_S, Stop, broken, or_exit
from workers.upstreams.changes import changes
from workers.upstreams.discovery import Discovery, DnsDiscovery, merged
from workers.upstreams.journals import UpstreamJournals, add
from workers.upstreams.slot import BuildLife, UpstreamSlot
from workers.upstreams.watched_file import LOOK_S, UpstreamsFile
from workers.worker import InferenceWorker
from workers.worker_group import LEAVE_S, BackOff

log = structlog.get_logger(__name__)


def discovery_of(entry: UpstreamEntry, changed: Callable[[], object]) -> Discovery:
    """Return the discovery that an entry's field `discover` selects. It calls `changed` when its servers have changed."""
    if entry.discover == "dns":
        return DnsDiscovery(entry, changed)
    from workers.upstreams.endpoint_slices import SliceDiscovery  # imports aiohttp

    return SliceDiscovery(entry, changed)


def _same_search(one: UpstreamEntry, other: UpstreamEntry) -> bool:
    return (one.url, one.discover) == (other.url, other.discover)


class UpstreamGroup:
    """The upstreams of one process, which come and go while it runs."""

    def __init__(
        self,
        file: UpstreamsFile,
        build: BuildLife,
        stop: Stop,
        life: str,
        grace_s: float,
        name_check_s: float = 0.0,
        back_off: BackOff | None = None,
        discover: Callable[[UpstreamEntry, Callable[[], object]], Discovery] = discovery_of,
    ) -> None:
        """Prepare to run the upstreams of `file`.

        `life` is the id of this process, with which each instance id begins. `grace_s` is the time that draining workers may
        take. Workers that start with the process listen for `name_check_s` seconds whether their names are free.
        """
        self._file = file
        self._build = build
        self._stop = stop
        self._instances = (f"{life}-{number}" for number in count())
        self._grace_s = grace_s
        self._name_check_s = name_check_s
        self._back_off = back_off
        self._discover = discover
        self._listed: tuple[UpstreamEntry, ...] = ()
        self._discoveries: dict[str, Discovery] = {}
        self._discovering: dict[str, asyncio.Task[None]] = {}
        self._entries: tuple[UpstreamEntry, ...] = ()
        self._slots: dict[str, UpstreamSlot] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._broken = False
        self._applied: list[str] = []  # sentences about the changes of the present version of the file
        self.workers = CurrentWorkers(self._slots)
        self._past = JournalCounters()  # of lives that have ended
        self.journals = UpstreamJournals(self._slots.values(), self._past)

    async def run(self) -> int:
        """Run the upstreams until a stop is requested, and return the exit code. The file must have been read."""
        self.apply(self._file.entries)
        following = asyncio.ensure_future(self._follow())
        try:
            await self._stop.wanted.wait()
        finally:
            for task in (following, *self._discovering.values()):
                task.cancel()
        with or_exit(self._grace_s + CLEANUP_S + LEAVE_S, BROKE):
            for slot in self._slots.values():
                slot.want(None)
            if self._tasks:
                await asyncio.wait(self._tasks.values())
        return BROKE if self._broken else 0

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.reload()
            for slot in self._slots.values():
                slot.report()  # notes when a worker's state has changed

    async def reload(self) -> str:
        """Read the file now and apply its changes. Return why it cannot be applied; "" if it can."""
        return await self._file.look(self.apply)

    def apply(self, listed: Sequence[UpstreamEntry]) -> None:
        """Start, stop and change workers, so that they become those of `listed`, the entries of the file."""
        self._listed = tuple(listed)
        wanted = {entry.name: entry for entry in listed if entry.discover}
        for name in [*self._discoveries]:
            if name not in wanted or not _same_search(wanted[name], self._discoveries[name].entry):
                self._discovering.pop(name).cancel()
                del self._discoveries[name]
        for name, entry in wanted.items():
            if name in self._discoveries:
                self._discoveries[name].entry = entry
            else:
                found = self._discoveries[name] = self._discover(entry, self._reconcile)
                self._discovering[name] = asyncio.ensure_future(found.run())
        self._reconcile()

    def _reconcile(self) -> None:
        """Start, stop and change workers by the entries of the file and the discovered ones."""
        discovered = [entry for one in self._discoveries.values() for entry in one.entries()]
        entries = merged(self._listed, discovered)
        found, wanted = changes(self._entries, entries), {entry.name: entry for entry in entries}
        first = not self._entries and not self._slots
        self._entries = tuple(entries)
        for change in found:
            self._want(change.name, wanted.get(change.name), first=first)
            log.info(
                "upstream_changed_in_file",
                upstream=change.name,
                action=change.action,
                fields=list(change.fields),
            )
        self._applied = list(map(str, found))

    def _want(self, name: str, entry: UpstreamEntry | None, *, first: bool) -> None:
        slot = self._slots.get(name)
        if slot is not None:
            slot.want(entry)
        elif entry is not None:
            check_s = self._name_check_s if first else max(self._name_check_s, NAME_CHECK_S)
            slot = self._slots[name] = UpstreamSlot(
                entry, self._build, self._instances.__next__, self._stop.hurried, name_check_s=check_s,
                back_off=self._back_off, count=partial(add, self._past),
            )  # fmt: skip
            task = self._tasks[name] = asyncio.ensure_future(slot.run())
            task.add_done_callback(lambda task: self._ended(name, task))

    def _ended(self, name: str, task: "asyncio.Task[None]") -> None:
        """Forget a removed upstream. If the file lists it again meanwhile, start it again."""
        del self._slots[name], self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("upstream_broke", upstream=name, exc_info=error)
        entry = next((one for one in self._entries if one.name == name), None)
        if entry is not None and not self.stopping():
            self._want(name, entry, first=False)

    def stopping(self) -> bool:
        """Return whether the process is shutting down."""
        return self._stop.wanted.is_set()

    def fail(self, error: Exception) -> None:
        """End all workers and the process after `error`, because the failed callback may belong to any upstream."""
        for slot in self._slots.values():
            slot.fail(broken("a callback of the event loop", error))
        self._broken = True
        self._stop.wanted.set()

    def report(self) -> Json:
        """Return the state of the file and of all upstreams, for operators."""
        return {
            "file": {"path": str(self._file.path), "digest": self._file.digest, "error": self._file.error},
            "changes": self._applied,
            "discovery": [
                {
                    "name": name,
                    "url": one.entry.url,
                    "addresses": one.addresses,
                    "error": one.error,
                }
                for name, one in self._discoveries.items()
            ],
            "upstreams": [asdict(slot.report()) for slot in self._slots.values()],
        }


NAME_CHECK_S = 1.5  # a worker sends a heartbeat once a second


class CurrentWorkers(Sequence[InferenceWorker]):
    """The workers of the upstreams that have one now, in the order of the file."""

    def __init__(self, slots: dict[str, UpstreamSlot]) -> None:
        self._slots = slots

    def _now(self) -> list[InferenceWorker]:
        return [slot.worker for slot in self._slots.values() if slot.worker is not None]

    def __len__(self) -> int:
        return len(self._now())

    def __iter__(self) -> Iterator[InferenceWorker]:
        return iter(self._now())

    @overload
    def __getitem__(self, index: int) -> InferenceWorker: ...
    @overload
    def __getitem__(self, index: slice) -> list[InferenceWorker]: ...
    def __getitem__(self, index: int | slice) -> InferenceWorker | list[InferenceWorker]:
        return self._now()[index]
