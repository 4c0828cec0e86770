"""A helper process that writes the audit table `fleet_events`, and the class to use it.

A rebuild of the state store applies all events, one after another, to the fleet's state, so a single process must do this. That
process would spend half of its time on the rows of the audit table. Each row depends on one event only, so a second process, the
helper, can write the rows. The helper receives frames on its standard input. Each frame is a length and JSON. The first frame
names the database, and later frames are batches of events. An empty frame requests a confirmation: the helper writes a line to
its standard output when all batches before that frame are committed. If the helper fails, it writes the reason to its standard
output and ends.

The parent process writes the store's position, which is the last event that the store contains. The position and the helper's
rows are written in separate transactions. Use the helper only for a schema that has no readers yet: a reader could see the
position before the rows.
"""

import asyncio
import contextlib
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg
import msgspec

from controller.adapters.postgres.link import Connection, Link
from controller.read_model import rows as projection
from events import codec
from events.errors import HoldfastError
from events.fact import Recorded

_INSERT = (
    f"INSERT INTO fleet_events ({', '.join(projection.EVENT_COLUMNS)}) "
    f"VALUES ({', '.join(f'${n}' for n, _ in enumerate(projection.EVENT_COLUMNS, 1))}) ON CONFLICT (id) DO NOTHING"
)


class Repeated(HoldfastError):
    """An event is in the batch twice, or in the table already."""


async def copy(connection: Connection, rows: Sequence[projection.Row]) -> None:
    """Append all rows to the audit table, or none.

    Raise Repeated if an event is in the table already, or twice in `rows`.
    """
    try:
        await connection.copy_records_to_table("fleet_events", records=rows, columns=projection.EVENT_COLUMNS)
    except asyncpg.UniqueViolationError as error:
        raise Repeated from error


async def record(connection: Connection, rows: Sequence[projection.Row]) -> None:
    """Append the rows that are not in the audit table yet."""
    try:
        await copy(connection, rows)
    except Repeated:
        await connection.executemany(_INSERT, rows)


END_S = 5.0
# objects until the garbage collector runs; rare, because rows create no reference cycles
COLLECT_AT = 500_000
DONE = b"done\n"
_LENGTH = 4
_encode = msgspec.json.Encoder().encode


class AuditFailed(HoldfastError):
    """The process that writes the audit table has ended or hangs. Nothing has changed; try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperPolicy:
    """The conditions for starting the helper process that writes the audit table, and the helper's deadlines."""

    # minimum size of the first batch; a shorter history is written before a process has started
    events_min: int = 2_048
    cores_min: int = 2
    answer_s: float = 50.0  # deadline for sending one batch, or for committing the last three

    def possible(self) -> bool:
        """Return whether this machine has enough cores and runs Linux. Only Linux can end the helper when its parent ends."""
        return sys.platform == "linux" and len(os.sched_getaffinity(0)) >= self.cores_min


class AuditHelper:
    """Manages the helper process that writes the audit table.

    The helper is started with the first batch, and only if that batch is large enough.
    """

    def __init__(self, url: str, schema: str, policy: HelperPolicy = HelperPolicy()) -> None:
        self._policy = policy
        self._place = {"url": url, "schema": schema}
        self._process: asyncio.subprocess.Process | None = None
        # whether the first batch was too small, so that this process writes the rows itself
        self._refused = False

    @property
    def pid(self) -> int | None:
        """The pid of the helper process; None if it does not run."""
        return self._process.pid if self._process else None

    async def write(self, events: Sequence[Recorded]) -> bool:
        """Send a batch of events to the helper process. Raise AuditFailed if the helper has ended or hangs.

        Return False if the first batch was too small to start the helper. The caller must then write the rows of all batches.
        """
        if self._process is None:
            self._refused = self._refused or len(events) < self._policy.events_min
            if self._refused:
                return False
            await self._start()
        kept = [event for event in events if projection.audited(event.fact)]
        await self._send(_encode(([event.fact.kind() for event in kept], kept)))
        return True

    async def flush(self) -> None:
        """Wait until the helper has committed every batch. Raise AuditFailed if the helper has ended or hangs."""
        if self._process is None:
            return
        await self._send(b"")
        assert self._process.stdout is not None
        async with _within(self._policy.answer_s):
            if (said := await self._process.stdout.readline()) != DONE:
                raise await self._failure(said)

    async def close(self) -> None:
        """Kill the helper process. Batches that are not committed are lost."""
        process, self._process = self._process, None
        if process is None:
            return
        self._refused = True
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()

    async def _start(self) -> None:
        from controller.adapters.embedded.server import die_with

        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "controller.adapters.postgres.audit_helper",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )  # fmt: skip
        await self._send(_encode(self._place))

    async def _send(self, frame: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        async with _within(self._policy.answer_s):
            try:
                self._process.stdin.writelines((len(frame).to_bytes(_LENGTH), frame))
                await self._process.stdin.drain()
            except ConnectionError:
                raise await self._failure() from None

    async def _failure(self, said: bytes = b"") -> AuditFailed:
        """Return the error with the reason why the helper has ended: its message, or its exit status if it wrote none."""
        assert self._process is not None and self._process.stdout is not None
        said += await self._process.stdout.read()
        status = await self._process.wait()
        return AuditFailed(said.decode().strip() or f"exit status {status}. {AuditFailed.__doc__}")


@contextlib.asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise AuditFailed(f"silent for {seconds:g} s. {AuditFailed.__doc__}") from None


# --- the process ----------------------------------------------------------------------------------------------------


class _SentEvent(msgspec.Struct):
    """An event as sent to the helper: a `Recorded` with a fact that is still encoded.

    The event's kind tells how to decode the fact."""

    seq: int
    at: datetime
    fact: msgspec.Raw
    id: str
    source: str
    source_number: int
    through: int
    correlation: str
    causation: str
    said_at: datetime | None


_decode = msgspec.json.Decoder(tuple[list[str], list[_SentEvent]]).decode


def rows(frame: bytes) -> list[projection.Row]:
    """Decode a frame with a batch of events, and return the rows of the audit table."""
    kinds, events = _decode(frame)
    return [
        projection.event_row(
            Recorded(
                e.seq, e.at, codec.decode_body(kind, bytes(e.fact)), e.id, e.source, e.source_number, e.through,
                e.correlation, e.causation, e.said_at,
            )
        )
        for kind, e in zip(kinds, events, strict=True)
    ]  # fmt: skip


async def serve(frames: asyncio.StreamReader) -> None:
    """Write batches of events to the audit table until the input `frames` ends.

    While one batch is written, the next one is decoded.
    """
    place = json.loads(await _frame(frames) or b"")
    link = Link(place["url"], place["schema"], {"synchronous_commit": "off"})
    batches: asyncio.Queue[list[projection.Row] | None] = asyncio.Queue(1)

    async def read() -> None:
        while (frame := await _frame(frames)) is not None:
            await batches.put(rows(frame) if frame else None)
        writing.cancel()

    async def write() -> None:
        while True:
            if batch := await batches.get():
                async with link.use() as connection:
                    await record(connection, batch)
            else:
                sys.stdout.write(DONE.decode())
                sys.stdout.flush()

    try:
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(write())
            group.create_task(read())
    finally:
        await link.close()


async def _frame(frames: asyncio.StreamReader) -> bytes | None:
    """Return the next frame without its length; None at the end of the input."""
    try:
        return await frames.readexactly(int.from_bytes(await frames.readexactly(_LENGTH)))
    except asyncio.IncompleteReadError:
        return None


async def _main() -> int:
    frames = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(frames)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    failed = ""
    try:
        await serve(frames)
    except* HoldfastError as group:
        failed = str(group.exceptions[0])
    print(failed, end="", flush=True)
    return 1 if failed else 0


def main() -> int:
    """Run the helper process and return its exit code."""
    import uvloop

    gc.freeze()
    gc.set_threshold(COLLECT_AT)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main())


if __name__ == "__main__":
    sys.exit(main())
