"""A worker of NVIDIA Dynamo that the benchmark can break. It runs in the peer's own environment, with nothing of ours.

    DYNAMO_PYTHON benchmarks/peers/peer_worker.py MODEL_DIR GIVEN_FILE

Dynamo's mocker says random tokens and never fails, so no answer of it can be checked, and no error asked of it. Here a
token is a function of all tokens so far, so that one lost, doubled or altered token changes what follows, and time
passes as in our simulated engine: what arrives waits for the end of the step, a step in which someone decodes takes
20 ms, and prompts are read at 200,000 tokens a second. SIGUSR1: every step fails from now on. SIGUSR2: no longer. The
first token of each prompt that it was given is appended to GIVEN_FILE: it is not told the client's X-Request-Id.
"""

import asyncio
import hashlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from dynamo.common.utils.runtime import create_runtime
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model

STEP_S = 0.02
LATE_S = 0.005
PREFILL_TOKENS_PER_S = 200_000.0
FIRST, SPAN = 259, 1789  # of the tokenizer's ids, those that are whole text by themselves


class Sequence:
    """One request that runs."""

    def __init__(self, prompt: list[int]) -> None:
        self.unread = len(prompt)  # tokens of the prompt
        self.said: asyncio.Queue[int | None] = asyncio.Queue()  # None: the step failed
        self._running = hashlib.blake2b(b"".join(token.to_bytes(4, "little") for token in prompt))

    def step(self) -> None:
        """Say the next token."""
        token = FIRST + int.from_bytes(self._running.digest()[:8], "little") % SPAN
        self._running.update(token.to_bytes(4, "little"))
        self.unread = 0
        self.said.put_nowait(token)


class Engine:
    """Runs all requests in steps, until it is told to fail."""

    def __init__(self, given: Path) -> None:
        self._given = given
        self._broken = False
        self._sequences: list[Sequence] = []
        self._work = asyncio.Event()

    def fail(self, broken: bool) -> None:
        """Fail every step from now on, or do so no longer."""
        self._broken = broken

    async def run(self) -> None:
        """Make steps for as long as there are requests."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self._sequences:
                self._work.clear()
                await self._work.wait()
                due = loop.time()
            batch = list(self._sequences)
            due += sum(s.unread for s in batch) / PREFILL_TOKENS_PER_S
            due += STEP_S if any(not s.unread for s in batch) else 0.0
            await asyncio.sleep(max(0.0, due - loop.time()))
            if loop.time() - due >= LATE_S:  # make up for nothing in a burst
                due = loop.time()
            for sequence in batch:
                if self._broken:
                    sequence.said.put_nowait(None)
                else:
                    sequence.step()

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield one token at a time."""
        with self._given.open("a") as file:
            file.write(f"{request['token_ids'][0]}\n")
        sequence, last = Sequence(request["token_ids"]), request["stop_conditions"]["max_tokens"] - 1
        self._sequences.append(sequence)
        self._work.set()
        try:
            for number in range(last + 1):
                token = await sequence.said.get()
                if token is None:
                    raise RuntimeError("the engine is broken")
                yield {"token_ids": [token]} | ({"finish_reason": "length"} if number == last else {})
        finally:
            self._sequences.remove(sequence)


async def main(model: str, given: str) -> None:
    """Serve until killed."""
    engine = Engine(Path(given))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, engine.fail, True)
    loop.add_signal_handler(signal.SIGUSR2, engine.fail, False)
    runtime, _ = create_runtime("file", "tcp", "zmq")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        model,
        "m",
        worker_type=WorkerType.Aggregated,
        ignore_weights=True,
        kv_cache_block_size=64,
    )
    await asyncio.gather(engine.run(), endpoint.serve_endpoint(engine.generate, graceful_shutdown=False))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2]))
