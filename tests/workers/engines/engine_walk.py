"""Random histories of requests on two crowded engines.

Requests are submitted, cancelled, exported, stopped, resumed and moved at random. In every case each request gets the tokens of
the undisturbed answer, and in the end no block is left behind.
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from engine_contract import DEADLINE_S, Rig, asked, prompt
from engine_moves import CHANCE, PENALTIES, Pair, rest
from waits import turns

from workers.engines.engine import Export, Import, MoveEnded, MoveRefused

ASKED: list[tuple[list[int], dict[str, Any]]] = [
    (prompt(5 + 11 * n, n), {"max_tokens": 30 + 17 * (n % 5), **extra})
    for n, extra in enumerate(
        ({}, CHANCE, PENALTIES, {"logprobs": 2}, CHANCE | PENALTIES, {}, {"min_tokens": 9})
    )
]


@dataclass
class Walk:
    """One random history of two engines."""

    pair: Pair
    draw: random.Random
    moved: int = 0
    given_up: int = 0
    finished: int = 0
    gone: set[tuple[int, int]] = field(default_factory=set)  # (rig, key) cancelled in the middle of a move

    async def life(self, tokens: list[int], sampling: dict[str, Any], whole: list[int]) -> None:
        """One request, moved back and forth until it is over or cancelled."""
        rigs = [self.pair.source, self.pair.target]
        self.draw.shuffle(rigs)
        key, before = rigs[0].submit(tokens, **sampling), list[int]()
        left = self.draw.choice((self.draw.randint(1, 20), 10_000, 10_000))  # turns until it is cancelled
        while not await self.pass_turns(rigs[0], key):
            said = before + rigs[0].answers[key].tokens
            assert said == whole[: len(said)]
            if (id(rigs[0]), key) in self.gone:
                return
            if self.draw.random() < 0.05:
                self.draw.choice(rigs).engine.trust(self.draw.random() < 0.5)
            left -= 1
            if not left:
                rigs[0].engine.cancel(key)
                return
            arrived = await self.move(rigs, key, tokens, sampling, said)
            if arrived is not None:
                key, before = arrived
                rigs.reverse()
        answer = rigs[0].answers[key]
        assert answer.error is None
        assert before + answer.tokens == whole
        self.finished += 1

    async def move(
        self, rigs: list[Rig], key: int, tokens: list[int], sampling: dict[str, Any], said: list[int]
    ) -> tuple[int, list[int]] | None:
        """Try to move a request; return its new key and its tokens so far, or None if it stays."""
        export = rigs[0].engine.export(key)
        if export is None:
            return None
        accepted = said[: self.draw.randint(0, len(said))]
        other = rigs[1].key()
        request = asked(other, tokens + accepted, len(tokens), **rest(sampling, len(accepted)))
        coming = rigs[1].engine.reserve(other, request, len(tokens) + len(said) + self.draw.randint(0, 40))
        if isinstance(coming, str):
            export.close()
            return None
        if self.draw.random() < 0.03:
            asyncio.get_running_loop().call_later(self.draw.random() * 0.01, self.cancel, rigs[0], key)
        try:
            whole = await self.carried(rigs, key, other, export, coming)
        except (MoveEnded, MoveRefused):
            whole = None
        if whole is None:
            self.given_up += 1
            rigs[1].engine.cancel(other)
            if self.draw.choice([False, True]):
                export.resume()
            export.close()
            return None
        self.moved += 1
        if self.draw.random() < 0.5:
            export.close()
        rigs[0].engine.cancel(key)
        return other, whole[len(tokens) :]

    def cancel(self, rig: Rig, key: int) -> None:
        """Cancel a request, in whatever state its move is."""
        self.gone.add((id(rig), key))
        rig.engine.cancel(key)

    async def carried(
        self, rigs: list[Rig], key: int, other: int, export: Export, coming: Import
    ) -> list[int] | None:
        """Transfer a request; return its tokens, or None if the transfer was given up."""
        shards, size = len(rigs[0].engine.kv), rigs[0].engine.kv[0].block_size
        first = coming.cached_tokens // size
        for _ in range(self.draw.randint(0, 3)):
            await self.pass_turns(rigs[0], key)
            if (full := export.full_blocks()) > first:
                await asyncio.gather(
                    *(self.ship(export, coming, shard, first, full) for shard in range(shards))
                )
                first = full
            if self.draw.random() < 0.1:
                return None
        stopped = await export.stop()
        said = len(rigs[0].answers[key].tokens)
        for _ in range(self.draw.randint(0, 2)):
            await self.pass_turns(rigs[0], key)
        assert len(rigs[0].answers[key].tokens) == said, "it has stopped"
        chance, end = self.draw.random(), -(-stopped.computed // size)
        if chance < 0.1:
            return None
        if chance < 0.2:
            end -= 1
        if first < end:
            copies = [self.ship(export, coming, shard, first, end) for shard in range(shards)]
            if 0.2 < chance < 0.3:
                rigs[1].engine.cancel(other)
            if 0.3 < chance < 0.4:
                shipping = asyncio.gather(*copies)
                await turns()
                shipping.cancel()
                await asyncio.gather(shipping, return_exceptions=True)
                return None
            await asyncio.gather(*copies)
        await coming.commit(stopped.tokens, stopped.computed)
        return list(stopped.tokens)

    async def ship(self, export: Export, coming: Import, shard: int, first: int, end: int) -> None:
        """Transfer some blocks of one shard."""
        await coming.take(shard, first, await export.blocks(shard, first, end - first))

    async def pass_turns(self, rig: Rig, key: int) -> bool:
        """Let some time pass; return whether the answer is over."""
        for _ in range(self.draw.choice((0, 1, 2, 5, 12))):
            if rig.answers[key].over.is_set():
                return True
            await self.rest(0.001)
        return rig.answers[key].over.is_set()

    async def rest(self, most_s: float) -> None:
        """Let the loop run, in a third of the cases for `most_s`."""
        await asyncio.sleep(self.draw.choice((0, 0, most_s)))  # an engine's thread needs time, not turns


async def walk(pair: Pair, seed: int, lives: int = 14) -> Walk:
    """Run one history. The seed determines the actions; the machine's speed affects their outcome."""
    wholes = [(await pair.source.ask(tokens, **sampling)).tokens for tokens, sampling in ASKED]
    walking = Walk(pair, random.Random(seed))
    begun = []
    async with asyncio.timeout(2 * DEADLINE_S):
        for n in range(lives):
            tokens, sampling = ASKED[n % len(ASKED)]
            begun.append(asyncio.ensure_future(walking.life(tokens, sampling, wholes[n % len(ASKED)])))
            await walking.rest(0.003)
        try:
            await asyncio.gather(*begun)
        finally:
            for one in begun:
                one.cancel()
    await pair.is_empty()
    return walking
