"""When a rank of the simulated engine begins its steps: on a clock that goes only when the test says so."""

import asyncio

from engine_contract import prompt

from events.wire import Chunk, Generate, Sampling
from workers.engines.simulated.rank import SimulatedRank
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming

ITL_S = 10.0


class StandingLoop(asyncio.SelectorEventLoop):
    """A loop whose time stands. Whoever waits must leave it something to do."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Driven:
    """A rank on such a loop, and how many tokens each request was given."""

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
        """Let so much time pass at once, and all that is due happen; return the tokens said so far."""
        self.loop.now += seconds
        for _ in range(50):
            await asyncio.sleep(0)
        return dict(self.said)


def asked(key: int, tokens: int) -> Generate:
    return Generate(key, "r", prompt(tokens, key), tokens, Sampling(max_tokens=60, ignore_eos=True))


def test_a_loop_that_was_away_owes_nobody_the_steps_of_that_time() -> None:
    async def main() -> None:
        driven = Driven(asyncio.get_running_loop())
        driven.submit(1, 20)
        assert await driven.after(0) == {1: 1}  # reading a prompt takes no time here
        assert await driven.after(7 * ITL_S) == {1: 2}
        assert await driven.after(ITL_S - 0.1) == {1: 2}  # the next step began when the late one ended
        assert await driven.after(0.1) == {1: 3}

    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        runner.run(main())


def test_timers_that_are_a_little_late_are_not_added_up() -> None:
    async def main() -> None:
        driven = Driven(asyncio.get_running_loop())
        driven.submit(1, 20)
        await driven.after(0)
        for step in range(1, 51):
            assert await driven.after(ITL_S + (0.004 if step == 1 else 0.0)) == {1: step + 1}
        assert await driven.after(ITL_S - 0.004) == {1: 52}

    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        runner.run(main())


def test_who_waits_for_room_begins_when_what_kept_it_is_cancelled() -> None:
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
