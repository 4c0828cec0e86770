"""Scales a model's workers by a command that the operator configures, such as `docker` or `sbatch`.

    {"model": …, "before": 2, "after": 4, …} ─▶ stdin      stdout ─▶ its last line: what was done   (status 0)
                                                           stderr ─▶ its last line: the error       (any other)

The command's input is the scale request. The last line of its output becomes the result. The hook waits for the command's
process only, because child processes may continue and keep the output open. At the deadline, the whole process group is killed.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO

from controller.adapters.scaling.one_line import last_line, one_line
from controller.ports import HookResult, ScaleRequest
from events.errors import BadSetting

TIMEOUT_S = 30.0
KILLED_WITHIN_S = 2.0
OUTPUT_KEPT = 64 * 1024  # number of last bytes that are kept, of stdout and of stderr each
READ_BYTES = 64 * 1024
SECRET = ("DATABASE_URL", "NATS_URL", "KEY", "TOKEN", "SECRET", "PASSWORD", "CREDS")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of an environment without Holdfast's variables for secrets, such as URLs with passwords and paths of keys."""
    return {
        name: value
        for name, value in environment.items()
        if not (name.upper().startswith("HOLDFAST_") and any(word in name.upper() for word in SECRET))
    }


class CommandScaleHook:
    """The scaling hook that runs one command, without a shell and in its own session."""

    by = "command"

    def __init__(self, argv: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        """Check the command. Raise BadSetting if `argv` has no program or `timeout_s` is not positive."""
        if not argv or not argv[0] or any("\0" in word for word in argv):
            raise BadSetting(f"the command {list(argv)!r} names no program")
        if not timeout_s > 0:
            raise BadSetting(f"the timeout of a command must be above 0 s, not {timeout_s:g} s")
        self._argv = tuple(argv)
        self._timeout_s = timeout_s

    async def scale(self, wanted: ScaleRequest) -> HookResult:
        """Run the command and return the result, which has the last line of the command's output.

        The command is killed at its deadline or if the caller is cancelled.
        """
        asked = json.dumps(asdict(wanted), ensure_ascii=False).encode() + b"\n"
        try:
            # The input is a file and not a pipe, because a command that does not read a pipe would block this process.
            with tempfile.TemporaryFile() as stdin, KeptOutput() as out, KeptOutput() as err:
                stdin.write(asked)
                stdin.seek(0)
                return await self._run(stdin, out, err)
        except (OSError, ValueError) as error:  # ValueError: an argument that cannot be passed to a process
            why = getattr(error, "strerror", None) or str(error)
            return HookResult(False, one_line(f"{self._argv[0]} cannot be started: {why}"))

    async def _run(self, stdin: IO[bytes], out: "KeptOutput", err: "KeptOutput") -> HookResult:
        process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=stdin, stdout=out.end, stderr=err.end, env=without_secrets(os.environ), start_new_session=True
        )  # fmt: skip
        out.begin()
        err.begin()
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await process.wait()
        except TimeoutError:
            await _kill(process)
            return HookResult(False, f"it did not end within {self._timeout_s:g} s")
        except asyncio.CancelledError:
            await _kill(process)
            raise
        said = last_line(out.rest() if status == 0 else err.rest())
        return HookResult(status == 0, said or f"exit status {status}")


async def _kill(process: Process) -> None:
    """Kill a command and all processes of its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # a process that is blocked in the kernel cannot be waited for
        async with asyncio.timeout(KILLED_WITHIN_S):
            await process.wait()


class KeptOutput:
    """Reads a command's output from a pipe as the output arrives, and keeps only the last bytes.

    The pipe never fills, so the command does not block. asyncio's process transport is not used, because it would treat the
    command as running while a child process keeps the output open.
    """

    def __init__(self) -> None:
        self._kept = bytearray()
        self._read, self.end = os.pipe()
        os.set_blocking(self._read, False)
        self._open = True  # whether this process still has its copy of the writing end

    def __enter__(self) -> "KeptOutput":
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._read)
        self._close_end()
        os.close(self._read)

    def begin(self) -> None:
        """Start to read the command's output, and close the writing end of the pipe in this process.

        The command must have been started before, because it inherits the writing end at its start.
        """
        self._close_end()
        asyncio.get_running_loop().add_reader(self._read, self._read_available)

    def rest(self) -> bytes:
        """Return the last bytes of the output, including those that are still in the pipe."""
        for _ in range(OUTPUT_KEPT // READ_BYTES + 1):  # bounded: another process may still write
            if not self._read_available():
                break
        return bytes(self._kept)

    def _read_available(self) -> bool:
        """Read the available bytes. Return False if no bytes are available, or if all writing ends are closed."""
        try:
            read = os.read(self._read, READ_BYTES)
        except BlockingIOError:
            return False
        if not read:  # all writing ends are closed
            asyncio.get_running_loop().remove_reader(self._read)
            return False
        self._kept += read
        del self._kept[:-OUTPUT_KEPT]
        return True

    def _close_end(self) -> None:
        if self._open:
            self._open = False
            os.close(self.end)
