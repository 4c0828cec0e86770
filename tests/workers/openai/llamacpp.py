"""Real llama-servers for the tests: started on free ports, stopped, broken and revived.

`make test-llamacpp` sets TEST_LLAMACPP_DIR to the folder with the server and the model, as built by llamacpp_build.py.
"""

import os
import signal
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from llamacpp_build import server_in
from waits import block_until

from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.server import die_with

FOLDER = "TEST_LLAMACPP_DIR"
STARTS_WITHIN_S = 30.0
STOPS_WITHIN_S = 10.0
SLOTS = 8
CONTEXT = 2048  # of one slot
FLAGS = (
    "--alias", "tiny",  # the same name on all of them
    "--parallel", str(SLOTS),
    "--ctx-size", str(SLOTS * CONTEXT),
    "--threads", "1",
    "--threads-batch", "1",
    "--flash-attn", "off",  # with it, or with the usual half-precision cache, other requests in the batch change the logits
    "--cache-type-k", "f32",  # by up to 5e-3, and healthy servers fail canaries; without both by 5e-5
    "--cache-type-v", "f32",
    "--no-ui",
)  # fmt: skip


def folder() -> Path | None:
    """Return the folder with the server and the model; None if they were not built."""
    named = os.environ.get(FOLDER, "")
    return Path(named).resolve() if named else None


@dataclass
class LlamaServer:
    """One server, always on the same port."""

    made: Path
    log: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @classmethod
    def start(cls, made: Path, log: Path) -> "LlamaServer":
        """Start a server and wait until it serves."""
        server = cls(made, log, free_port())
        server.begin()
        return server

    def begin(self) -> None:
        """Start it (again), and wait until it serves."""
        command: list[str | Path] = [server_in(self.made), "--model", self.made / "tiny.gguf", *FLAGS]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=output,
                stderr=output,
                preexec_fn=die_with(os.getpid()),
            )
        process = self.process
        block_until(lambda: self.healthy() or process.poll() is not None, STARTS_WITHIN_S, str(self.log))
        if process.poll() is not None:
            raise RuntimeError(f"llama-server did not start: {self.log.read_text()[-2000:]}")

    def healthy(self) -> bool:
        """Whether it reports that it is healthy."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(STOPS_WITHIN_S)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing moves."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def revive(self) -> None:
        """Make it serve again, whatever was done to it."""
        if self.process is None or self.process.poll() is not None:
            self.begin()
        else:
            self.thaw()

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
