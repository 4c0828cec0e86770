"""The two engines that `fidelity` compares, behind one frontend, and the simulated one's profiles.

The transformers engine serves a model of 15 million weights. Its steps take 7 ms and more of a core, so that they measure
the model, and not Python (those of `holdfast model tiny` take 3). Its vocabulary consists of whole words, so that each token is
an event at the client, as with the simulated engine.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.server import die_with
from events.errors import HoldfastError
from events.observations import WorkerJoined
from workers.engines.simulated.timing import Interpolated, StepPlan
from workers.engines.tiny import CONFIG, VOCABULARY, write_model

REAL, SIMULATED = "transformers", "simulated"
MODEL = {**CONFIG, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
CONTEXT_TOKENS = 2048
BLOCK_TOKENS, KV_BLOCKS = 32, 2048  # those of the transformers engine
BATCH_MAX, PREFILL_TOKENS_MAX = 32, 256
SHAPE = {
    "context-tokens": CONTEXT_TOKENS,
    "block-tokens": BLOCK_TOKENS,
    "batch-max": BATCH_MAX,
    "prefill-tokens-max": PREFILL_TOKENS_MAX,
}
# The engine computes rows in groups of four: a batch of five takes as long as one of eight.
BATCHES = "1,2,4,5,8,12"
CONTEXTS = "16,128,768"
LENGTHS = "16,32,64,96,128,192,256,384,512,768"
CANARIES_S = "3600"  # rare: they would be measured as well
STARTS_S_MAX = 60.0


class CannotCompare(HoldfastError):
    """An engine cannot be measured, or has not answered all requests completely."""


class Engines:
    """A fleet of the two engines, one worker each. The simulated one is replaced with each profile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "fleet"
        self._simulated: subprocess.Popen[bytes] | None = None
        self._fleet: LocalFleet | None = None

    @property
    def url(self) -> str:
        """The frontend's URL."""
        assert self._fleet is not None
        return self._fleet.url

    async def start(self) -> None:
        """Start a fleet with the transformers engine. Raise NotAsExpected."""
        model = self._folder / REAL
        model.mkdir()
        write_model(model, MODEL)
        _write_words(model / "tokenizer.json")
        shape = {f"HOLDFAST_WORKER_{name.replace('-', '_').upper()}": str(n) for name, n in SHAPE.items()}
        flags = ("--engine", "transformers", "--model", str(model), "--workers", "1")
        self._fleet = LocalFleet.start(self._data, *flags, "--canary-interval", CANARIES_S, environment=shape)
        await self._fleet.ready()
        await self._fleet.healthy(1)

    async def measure(self, profile: Path, repeats: int) -> None:
        """Measure the transformers engine with `holdfast profile`. Raise CannotCompare on failure."""
        sweep = ("--isl", LENGTHS, "--context", CONTEXTS, "--concurrency", BATCHES, "--repeats", str(repeats))
        process = await asyncio.create_subprocess_exec(
            *_holdfast("profile", await self._address(), "-o", str(profile), *sweep),
            stdout=sys.stderr.fileno(),
        )
        try:
            if await process.wait():
                raise CannotCompare("the transformers engine could not be measured")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def simulate(self, model: str, profile: Path) -> None:
        """Replace the simulated engine by one with this profile. Raise NotAsExpected."""
        assert self._fleet is not None
        self._replace(model, profile)
        await self._fleet.until(
            lambda status: any(w["id"] == model and w["health"] == "HEALTHY" for w in status["workers"]),
            STARTS_S_MAX,
        )

    def _replace(self, model: str, profile: Path) -> None:
        self._end_simulated()
        shape = {**SHAPE, "kv-blocks": KV_BLOCKS, "watermark": 0}
        flags = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
        flags += ["--model", model, "--name", model, "--planner-profile-data", str(profile)]
        with (self._folder / f"{model}.log").open("wb") as output:
            self._simulated = subprocess.Popen(
                _holdfast("worker", "--data", str(self._data), *flags),
                stdout=output,
                stderr=output,
                preexec_fn=die_with(os.getpid()),
            )

    def stop(self) -> None:
        """End all processes."""
        self._end_simulated()
        if self._fleet is not None:
            self._fleet.stop()

    def _end_simulated(self) -> None:
        if self._simulated is not None:
            self._simulated.terminate()
            self._simulated.wait(timeout=30)
            self._simulated = None

    async def _address(self) -> str:
        assert self._fleet is not None
        facts = [event.fact for event in await self._fleet.events()]
        return next(fact.url for fact in facts if isinstance(fact, WorkerJoined) and fact.model == REAL)


def alone_ms(profile: Path, prompt: int, answer: int) -> dict[str, float]:
    """Return the time of a prompt and of a token of its answer without other requests, by a profile."""
    model = Interpolated.load(profile)
    prefill_ms = model.prefill_ms(StepPlan(prompt, prefills=(prompt,)))
    return {
        "prefill": prefill_ms,
        "decode": model.decode_ms(StepPlan(decodes=1, context_tokens=prompt + answer // 2)),
    }


def _holdfast(*words: str) -> list[str]:
    return [sys.executable, "-m", "controller.cli", *words]


def _write_words(path: Path) -> None:
    """Write a tokenizer in which every id of the model's vocabulary is a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
