"""The start times of a simulated rank's steps, on a clock that the test controls."""

import asyncio

from engine_contract import prompt
from waits import turns

from events.wire import Chunk, Generate, Sampling
from workers.engines.simulated.rank import SimulatedRank
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming

ITL_S = 10.0


class StandingLoop(asyncio.SelectorEventLoop):
    """A loop with a stopped clock. A waiting test must leave it something to run."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Driven:
    """A rank on such a loop, and the number of tokens of each request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kv_blocks: int = 64) -> None:
        assert isinstance(loop, StandingLoop)
        shape = EngineShape(context_tokens=128, kv_blocks=kv_blocks, watermark=0)
        self.loop = loop
        self.rank = SimulatedRank(0, shape, ConstantTiming(itl_s=ITL_S))
        self.said: dict[int, int] = {}
        self.rank.start(self._hear, lambda number, events: None)

    def _hear(self, out: list[tuple[int, Chunk]]) -> None:
        for key, chunk in out:
            self.said[key] = self.said.get(key, 0) + len(chunk.tokens)

    def submit(self, key: int, tokens: int) -> None:
        self.rank.submit(key, asked(key, tokens))

    async def after(self, seconds: float) -> dict[int, int]:
        """Advance the clock by `seconds` at once, and run all that is due; return the tokens so far."""
        self.loop.now += seconds
        await turns(50)
        return dict(self.said)


def asked(key: int, tokens: int) -> Generate:
    return Generate(key, "r", prompt(tokens, key), tokens, Sampling(max_tokens=60, ignore_eos=True))


def test_a_stalled_loop_does_not_catch_up_its_steps() -> None:
    async def main() -> None:
        driven = Driven(asyncio.get_running_loop())
        driven.submit(1, 20)
        assert await driven.after(0) == {1: 1}  # prefill takes no time here
        assert await driven.after(7 * ITL_S) == {1: 2}
        assert await driven.after(ITL_S - 0.1) == {1: 2}  # the next step began when the late one ended
        assert await driven.after(0.1) == {1: 3}

    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        runner.run(main())


def test_small_timer_delays_do_not_add_up() -> None:
    async def main() -> None:
        driven = Driven(asyncio.get_running_loop())
        driven.submit(1, 20)
        await driven.after(0)
        for step in range(1, 51):
            assert await driven.after(ITL_S + (0.004 if step == 1 else 0.0)) == {1: step + 1}
        assert await driven.after(ITL_S - 0.004) == {1: 52}

    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        runner.run(main())


def test_a_waiting_request_starts_when_the_blocking_one_is_cancelled() -> None:
    async def main() -> None:
        driven = Driven(asyncio.get_running_loop(), kv_blocks=8)
        coming = driven.rank.reserve(1, asked(1, 60), 100)
        assert not isinstance(coming, str)
        driven.submit(2, 40)
        assert await driven.after(5 * ITL_S) == {}
        driven.rank.cancel(1)
        assert await driven.after(0) == {2: 1}

    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        runner.run(main())
