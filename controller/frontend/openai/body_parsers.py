"""Parses request bodies that are too large for the event loop, in processes that can be killed.

    up to 4 MiB ──▶ one process
    more ─────────▶ another process, so that long prompts do not wait for huge bodies

A thread would not help: the decoder holds the interpreter lock until it has finished. Each process is started for the first body
that needs it, and restarted after it was killed or has failed.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from controller.frontend.errors import ApiError, unavailable
from controller.frontend.metrics import BoundMetrics
from controller.frontend.openai.parse_process import HEAD, NAMES, SIZE, outcome
from controller.frontend.settings import AdmissionSettings

MIB = 2**20
HUGE_BYTES = 4 * MIB
PIECE_BYTES = 2**18  # written to a process at a time
RETRY_AFTER_S = 1
COMMAND = (sys.executable, "-m", "controller.frontend.openai.parse_process")

log = structlog.get_logger(__name__)


class BodyParsers:
    """The parser processes of one frontend."""

    def __init__(self, settings: AdmissionSettings, bounds: BoundMetrics) -> None:
        """Start without processes. `bounds` counts each refused body."""
        self._settings = settings
        self._bounds = bounds
        self._processes = (_ParserProcess(), _ParserProcess())
        self.waiting_bytes = 0  # of bodies that are being parsed or wait for a process

    async def parse(self, name: str, body: bytes) -> Any:
        """Return the result of the named parser for a body. Raise ApiError: 400 if it is invalid, 503 above a limit."""
        most, size = self._settings.bodies_mb_max * MIB, len(body)
        if self.waiting_bytes and self.waiting_bytes + size > most:
            why = f"{self.waiting_bytes // MIB} MB of requests' bodies are waiting to be parsed"
            raise self._refusal("queue_full", why)
        self.waiting_bytes += size
        running = asyncio.create_task(self._parse(self._processes[size > HUGE_BYTES], name, body))
        running.add_done_callback(partial(self._parsed, size))
        # A disconnected client does not stop the parser: starting another process costs more than finishing.
        return outcome(name, await asyncio.shield(running))

    def _parsed(self, size: int, running: "asyncio.Task[bytes]") -> None:
        self.waiting_bytes -= size
        if not running.cancelled():
            running.exception()  # mark as retrieved, even if the client has disconnected

    async def _parse(self, process: "_ParserProcess", name: str, body: bytes) -> bytes:
        limit_s = self._settings.body_parse_s
        try:
            async with asyncio.timeout(limit_s), process.lock:
                for _ in range(2):  # the process may have died before this body
                    try:
                        return await process.parse(name, body)
                    except (OSError, asyncio.IncompleteReadError) as error:
                        log.warning("body_parser_failed", why=type(error).__name__)
        except TimeoutError as error:
            raise self._refusal("queue_timeout", f"the body was not parsed within {limit_s:g} s") from error
        raise self._refusal("queue_full", "the process that parses bodies has ended")

    def _refusal(self, code: str, why: str) -> ApiError:
        self._bounds.count("body_parse")
        return unavailable(why, code, RETRY_AFTER_S)

    async def close(self) -> None:
        """Stop the processes."""
        for process in self._processes:
            await process.end()


class _ParserProcess:
    """A process that parses one body at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._process: Process | None = None

    async def parse(self, name: str, body: bytes) -> bytes:
        """Return the encoded outcome. Kill the process if the caller gives up. Raise OSError, IncompleteReadError."""
        try:
            process = await self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(HEAD.pack(len(body), NAMES.index(name)))
            view = memoryview(body)
            for at in range(0, len(body), PIECE_BYTES):
                process.stdin.write(bytes(view[at : at + PIECE_BYTES]))
                await process.stdin.drain()
            (size,) = SIZE.unpack(await process.stdout.readexactly(SIZE.size))
            return await process.stdout.readexactly(size)
        except RuntimeError as error:  # raised by uvloop for a pipe that it has already closed
            await self.end()
            raise BrokenPipeError(str(error)) from error
        except BaseException:  # a late outcome must not be read as that of the next body
            await self.end()
            raise

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            own = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=PIPE, stdout=PIPE, env=own, limit=PIECE_BYTES
            )
        return self._process

    async def end(self) -> None:
        """Kill the process, if there is one, and wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):  # it has already ended
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
