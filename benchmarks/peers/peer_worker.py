"""A worker of NVIDIA Dynamo that the benchmark can break; it runs in Dynamo's own environment.

    DYNAMO_PYTHON benchmarks/peers/peer_worker.py MODEL_DIR GIVEN_FILE

Dynamo's mocker generates random tokens and never fails, so its answers cannot be checked, and it cannot be made to fail. Here a
token is a function of all tokens so far, so that one lost, doubled or altered token changes all that follow. Time
passes as in our simulated engine: a new request waits for the end of the step, a step with decoding takes
20 ms, and prompts are read at 200,000 tokens per second. SIGUSR1 makes every step fail from then on, SIGUSR2 stops that. The
first token of each prompt is appended to GIVEN_FILE, because the worker does not get the client's X-Request-Id.
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
FIRST, SPAN = 259, 1789  # the tokenizer's ids that are complete text by themselves


class Sequence:
    """One running request."""

    def __init__(self, prompt: list[int]) -> None:
        self.unread = len(prompt)  # tokens of the prompt
        self.said: asyncio.Queue[int | None] = asyncio.Queue()  # None: the step failed
        self._running = hashlib.blake2b(b"".join(token.to_bytes(4, "little") for token in prompt))

    def step(self) -> None:
        """Generate the next token."""
        token = FIRST + int.from_bytes(self._running.digest()[:8], "little") % SPAN
        self._running.update(token.to_bytes(4, "little"))
        self.unread = 0
        self.said.put_nowait(token)


class Engine:
    """Runs all requests in steps, until it is made to fail."""

    def __init__(self, given: Path) -> None:
        self._given = given
        self._broken = False
        self._sequences: list[Sequence] = []
        self._work = asyncio.Event()

    def fail(self, broken: bool) -> None:
        """Fail every step from now on, or stop that."""
        self._broken = broken

    async def run(self) -> None:
        """Run steps while there are requests."""
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
            if loop.time() - due >= LATE_S:  # do not catch up in a burst
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
