"""A command that makes the workers of a model as many as are wanted: whatever an operator has, from `docker` to `sbatch`.

    {"model": …, "before": 2, "after": 4, …} ─▶ stdin      stdout ─▶ its last line: what was done   (status 0)
                                                           stderr ─▶ its last line: why not         (any other)

What a reader would get wrong: a command has ended when its process has, though something that it has started may go on and
hold its output open. That is let be; only at the deadline all of its process group is killed.
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
from types import TracebackType
from typing import IO

from controller.adapters.scaling.says import last_line, one_line
from controller.ports import HookResult, WantedScale
from events.errors import BadSetting

TIMEOUT_S = 30.0
KILLED_WITHIN_S = 2.0
OUTPUT_KEPT = 64 * 1024  # bytes of stdout and of stderr: the end of each
READ_BYTES = 64 * 1024
SECRET = ("DATABASE_URL", "NATS_URL", "KEY", "TOKEN", "SECRET", "PASSWORD", "CREDS")


def told(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what lets its owner into the fleet: the URLs with their passwords, and where keys lie."""
    return {
        name: value
        for name, value in environment.items()
        if not (name.upper().startswith("HOLDFAST_") and any(word in name.upper() for word in SECRET))
    }


class CommandScaleHook:
    """One command. It is started without a shell, in a session of its own."""

    by = "command"

    def __init__(self, argv: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        """Raise BadSetting for a command without a word, or without time."""
        if not argv or not argv[0] or any("\0" in word for word in argv):
            raise BadSetting(f"the command {list(argv)!r} names no program")
        if not timeout_s > 0:
            raise BadSetting(f"a command needs more time than {timeout_s:g} s")
        self._argv = tuple(argv)
        self._timeout_s = timeout_s

    async def scale(self, wanted: WantedScale) -> HookResult:
        """Run the command and return what it says. It is killed at its deadline, and where the caller does not wait for it."""
        asked = json.dumps(asdict(wanted), ensure_ascii=False).encode() + b"\n"
        try:
            # A file, and no pipe: who does not read it, or closes it, leaves nobody waiting.
            with tempfile.TemporaryFile() as stdin, KeptOutput() as out, KeptOutput() as err:
                stdin.write(asked)
                stdin.seek(0)
                return await self._ran(stdin, out, err)
        except (OSError, ValueError) as error:  # ValueError: what cannot be said to a process
            why = getattr(error, "strerror", None) or str(error)
            return HookResult(False, one_line(f"{self._argv[0]} cannot be started: {why}"))

    async def _ran(self, stdin: IO[bytes], out: "KeptOutput", err: "KeptOutput") -> HookResult:
        process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=stdin, stdout=out.end, stderr=err.end, env=told(os.environ), start_new_session=True
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
    """End a command and all that it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # one that the kernel holds up: it is let be
        async with asyncio.timeout(KILLED_WITHIN_S):
            await process.wait()


class KeptOutput:
    """A pipe into which a process writes. It is read as it comes, so that nobody waits; only its end is kept.

    It is ours, not the process's transport's: that would hold for unended whoever has left his output to another.
    """

    def __init__(self) -> None:
        self._kept = bytearray()
        self._read, self.end = os.pipe()
        os.set_blocking(self._read, False)
        self._open = True  # the writing end, of ours

    def __enter__(self) -> "KeptOutput":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._read)
        self._let_go()
        os.close(self._read)

    def begin(self) -> None:
        """Read, now that the process has its end."""
        self._let_go()
        asyncio.get_running_loop().add_reader(self._read, self._more)

    def rest(self) -> bytes:
        """Return the end of what was written, with what lies in the pipe."""
        for _ in range(OUTPUT_KEPT // READ_BYTES + 1):  # more than a pipe holds: somebody else writes on
            if not self._more():
                break
        return bytes(self._kept)

    def _more(self) -> bool:
        """Take in what there is; return whether there was anything."""
        try:
            read = os.read(self._read, READ_BYTES)
        except BlockingIOError:
            return False
        if not read:  # nobody can write any more
            asyncio.get_running_loop().remove_reader(self._read)
            return False
        self._kept += read
        del self._kept[:-OUTPUT_KEPT]
        return True

    def _let_go(self) -> None:
        if self._open:
            self._open = False
            os.close(self.end)
