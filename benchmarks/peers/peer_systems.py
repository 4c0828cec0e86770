"""The two systems that `benchmarks.peers.peer` compares, each started as its users start it.

`flat`: two engines without delays (Dynamo's mocker, our simulated engine). Otherwise: three engines with a
token every 20 ms, which can be broken: `benchmarks/peers/peer_worker.py`, and again our simulated engine.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.server import die_with
from controller.demo.clients import Received
from controller.demo.fleet import NotAsExpected
from controller.frontend.openai.text.chat_templates import SIM_TEMPLATE
from events.observations import RequestMigrated
from events.token_bytes import BUILTIN_FILE

ENGINES, ENGINES_FLAT = 3, 2
STARTS_WITHIN_S = 120.0
VOCABULARY = 2048
PROMPTS = [[300 + (7 * i + 13 * k) % 1500 for k in range(40)] for i in range(24)]  # no two begin alike


class System(Protocol):
    """One of the two systems. A worker is named by its PID."""

    name: str

    async def start(self) -> None:
        """Start it, and wait until all its workers serve."""

    async def stop(self) -> None:
        """End all of its processes."""

    @property
    def url(self) -> str:
        """Return its URL."""

    async def model(self) -> str:
        """Return the model's name."""

    async def frontends(self) -> list[int]:
        """Return the PIDs of its frontends."""

    async def workers(self) -> list[int]:
        """Wait until it has recovered; return the PIDs of its workers."""

    async def fail(self, worker: int, broken: bool) -> None:
        """Make a worker's engine raise at every step, or stop that."""

    async def struck(self, worker: int, streams: Sequence[Received]) -> set[str]:
        """Return the requests that were running on a worker when it failed."""


class Holdfast:
    """`holdfast up` with simulated workers."""

    name = "Holdfast"

    def __init__(self, folder: Path, *, flat: bool) -> None:
        self._folder, self._workers = folder, ENGINES_FLAT if flat else ENGINES
        self._itl = "0" if flat else "20"
        self._names: dict[int, str] = {}

    async def start(self) -> None:
        flags = ("--workers", str(self._workers), "--frontends", "2", "--itl-ms", self._itl)
        soon = (
            "--canary-interval",
            "1",
            "--breaker-wait",
            "1",
            "--breaker-backoff",
            "1",
        )  # for a quick recovery
        environment = {"HOLDFAST_WORKER_BATCH_MAX": "512"}
        self._fleet = LocalFleet.start(self._folder, *flags, *soon, "--chaos", environment=environment)
        await self._fleet.ready()
        await self.workers()

    async def stop(self) -> None:
        await asyncio.to_thread(self._fleet.stop)

    @property
    def url(self) -> str:
        return self._fleet.url

    async def model(self) -> str:
        return str((await self._fleet.status())["workers"][0]["model"])

    async def frontends(self) -> list[int]:
        return [p["pid"] for p in (await self._fleet.status())["processes"] if p["role"] == "frontend"]

    async def workers(self) -> list[int]:
        status = await self._fleet.healthy(self._workers)
        self._names = {w["pid"]: w["id"] for w in status["workers"]}
        return list(self._names)

    async def fail(self, worker: int, broken: bool) -> None:
        await self._fleet.act("error" if broken else "heal", self._names[worker])

    async def struck(self, worker: int, streams: Sequence[Received]) -> set[str]:
        ours = {stream.request for stream in streams}
        facts = [event.fact for event in await self._fleet.events()]
        moved = [fact for fact in facts if isinstance(fact, RequestMigrated) and fact.request in ours]
        return {fact.request for fact in moved if fact.source == self._names[worker]}


class Dynamo:
    """NVIDIA Dynamo: one frontend (it uses all cores), migration on, file discovery, and its own workers."""

    name = "Dynamo"

    def __init__(self, folder: Path, python: Path, *, flat: bool) -> None:
        self._folder, self._python, self._flat = folder, python, flat
        self._port, self._started = free_port(), 0
        self._flags: tuple[str, ...] = ("--migration-limit", "3")  # of its frontend
        self._processes = ENGINES_FLAT if flat else ENGINES  # engine processes
        self._listing = self._processes  # engines that the frontend must list
        self._frontend: subprocess.Popen[bytes] | None = None
        self._workers: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        make_model(self._folder / "model")
        (self._folder / "discovery").mkdir()
        self._frontend = self._run(
            "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self._port),
            "--discovery-backend", "file", *self._flags,
        )  # fmt: skip
        await self.workers()

    async def stop(self) -> None:
        running = [p for p in (self._frontend, *self._workers) if p is not None]
        for process in running:
            process.kill()
        for process in running:
            await asyncio.to_thread(process.wait, 10)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def model(self) -> str:
        return "m"

    async def frontends(self) -> list[int]:
        return [self._frontend.pid] if self._frontend else []

    async def workers(self) -> list[int]:
        """Replace the workers that ended, and wait until the frontend lists all of them and no dead one.

        The records of their earlier requests are dropped.
        """
        deadline = time.monotonic() + STARTS_WITHIN_S
        while True:
            self._workers = [w for w in self._workers if w.poll() is None]
            while len(self._workers) < self._processes:  # occasionally one ends while it starts
                self._workers.append(self._run(*self._engine()))
            if await self._listed() == self._listing:
                break
            if time.monotonic() > deadline:
                raise NotAsExpected(f"Dynamo did not start: {self._log().read_text()[-1000:]}")
            await asyncio.sleep(0.25)
        for worker in self._workers:
            self._given(worker).unlink(missing_ok=True)
        return [w.pid for w in self._workers]

    async def fail(self, worker: int, broken: bool) -> None:
        os.kill(worker, signal.SIGUSR1 if broken else signal.SIGUSR2)

    async def struck(self, worker: int, streams: Sequence[Received]) -> set[str]:
        process = next(w for w in self._workers if w.pid == worker)
        given = set(map(int, self._given(process).read_text().split()))
        return {s.request for s in streams if PROMPTS[s.prompt][0] in given}

    def _engine(self) -> tuple[str, ...]:
        if self._flat:
            return self._mocker("--speedup-ratio", "1000000", "--max-num-seqs", "1024")
        self._started += 1
        return (
            str(Path(__file__).with_name("peer_worker.py")),
            str(self._folder / "model"),
            str(self._folder / f"given-{self._started}"),
        )

    def _mocker(self, *flags: str) -> tuple[str, ...]:
        model = str(self._folder / "model")
        return (
            "-m", "dynamo.mocker", "--model-path", model, "--model-name", "m", *flags, "--discovery-backend", "file",
        )  # fmt: skip

    def _given(self, worker: subprocess.Popen[bytes]) -> Path:
        arguments: Any = worker.args
        return self._folder / Path(arguments[-1]).name

    def _log(self) -> Path:
        return self._folder / "log"

    def _run(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "DYN_LOG": "error",  # its log per request costs time, and we write none
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
        with self._log().open("ab") as output:
            return subprocess.Popen(
                [str(self._python), *words],
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
                preexec_fn=die_with(os.getpid()),
            )

    async def _listed(self) -> int:
        """Return the number of workers that the frontend lists; 0 while it does not respond, or has no model."""
        timeout = aiohttp.ClientTimeout(total=2)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with aiohttp.ClientSession(self.url, timeout=timeout) as session:
                async with session.get("/v1/models") as answer:
                    if not (await answer.json())["data"]:
                        return 0
                async with session.get("/health") as answer:
                    found = (await answer.json())["instances"]
                    return sum(one["endpoint"] == "generate" for one in found)
        return 0


def make_model(folder: Path) -> None:
    """Write the tokenizer of our simulated engine as a model's folder, without weights."""
    folder.mkdir(parents=True)
    shutil.copy(BUILTIN_FILE, folder / "tokenizer.json")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": SIM_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
