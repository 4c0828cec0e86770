"""The contract of engines that move requests with their KV cache.

Subclass `EngineMoves`, and give it a `made` fixture:

    class TestMyMoves(EngineMoves):
        @pytest.fixture
        def made(self) -> Made: ...   # returns equal engines, one per call, not yet started

A request that was moved at any point, by either method, gives the undisturbed answer, and nothing is left behind.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from engine_contract import DEADLINE_S, Answer, Rig, asked, prompt
from waits import turns

from events.wire import Generate
from workers.engines.engine import MOVES_MAX, Engine, Export, Import, MoveEnded, MoveRefused, Stopped

Made = Callable[[], Engine]
COUNT = 40  # tokens of an answer
CHANCE: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 7}
PENALTIES: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded sampling": CHANCE,
    "penalties": PENALTIES,
    "sampling with penalties": CHANCE | PENALTIES,
    "biases": CHANCE | {"min_p": 0.05, "logit_bias": {300: 6.0, 301: -100.0}},
    "logprobs": CHANCE | {"logprobs": 3},
}


@dataclass
class Pair:
    """Two equal engines."""

    source: Rig
    target: Rig

    @property
    def block(self) -> int:
        return self.source.engine.kv[0].block_size

    async def leaving(self, tokens: list[int], **sampling: Any) -> tuple[int, Export]:
        """Submit a request to the source; return the key and the export once it decodes."""
        key = self.source.submit(tokens, **sampling)
        return key, await self.exported(key)

    async def exported(self, key: int) -> Export:
        """Return the export of a request of the source once it decodes."""
        async with asyncio.timeout(DEADLINE_S):
            while (export := self.source.engine.export(key)) is None:
                assert not self.source.answers[key].over.is_set(), "the answer is over"
                await self.source.delivery()
        return export

    async def stopped_at(self, cut: int, tokens: list[int], **sampling: Any) -> tuple[int, Export, Stopped]:
        """Submit a request to the source, and stop it after exactly `cut` tokens.

        An engine on this loop may be late; then the request is repeated.
        """
        for _ in range(50):
            key, export = await self.leaving(tokens, halt=cut, **sampling)
            stopped = await (self._halted(cut, key, export) if self.source.threaded else export.stop())
            while len(stopped.tokens) < len(tokens) + cut:
                export.resume()
                await turns()
                stopped = await export.stop()
            if len(stopped.tokens) == len(tokens) + cut:
                return key, export, stopped
            export.close()
            self.source.engine.cancel(key)
        raise AssertionError(f"the engine has never stopped at {cut} tokens")

    async def _halted(self, cut: int, key: int, export: Export) -> Stopped:
        """Stop a request while its engine waits between two steps."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.source.answers[key].tokens) < cut:
                await self.source.delivery()
        stopping = asyncio.ensure_future(export.stop())
        await turns()
        self.source.go_on()
        return await stopping

    def reserve(self, request: Generate, room: int) -> tuple[int, Import]:
        """Reserve room at the target."""
        key = self.target.key()
        found = self.target.engine.reserve(key, request, room)
        assert not isinstance(found, str), found
        return key, found

    async def carry(self, export: Export, stopped: Stopped, coming: Import) -> None:
        """Transfer all blocks that the target does not have, a few at a time, and commit."""
        end = -(-stopped.computed // self.block)
        for shard in range(len(self.source.engine.kv)):
            for first in range(coming.cached_tokens // self.block, end, 2):
                await coming.take(shard, first, await export.blocks(shard, first, min(2, end - first)))
        await coming.commit(stopped.tokens, stopped.computed)

    async def whole(self, tokens: list[int], **sampling: Any) -> Answer:
        """Return the undisturbed answer of the source, without leaving a prefix at the target."""
        return await self.source.ask(tokens, **sampling)

    async def is_empty(self) -> None:
        """Wait until neither engine holds anything for any request."""
        for rig in (self.source, self.target):
            await rig.until(lambda rig=rig: rig.engine.load().kv_used == 0 and not rig.engine.load().running)


def rest(sampling: dict[str, Any], said: int) -> dict[str, Any]:
    """Return the remaining limits of an answer after `said` tokens, as a frontend reduces them."""
    least = max(0, sampling.get("min_tokens", 0) - said)
    return {**sampling, "max_tokens": sampling["max_tokens"] - said, "min_tokens": least}


class EngineMoves:
    """The suite."""

    @pytest.fixture
    def made(self) -> Made:
        raise NotImplementedError

    @pytest.fixture
    async def pair(self, made: Made) -> AsyncIterator[Pair]:
        rigs = [Rig(made()), Rig(made())]
        for rig in rigs:
            await rig.start()
        yield Pair(*rigs)
        for rig in rigs:
            await rig.engine.stop()

    async def moved(
        self, pair: Pair, tokens: list[int], cut: int, method: str, accepted: int = 0, **sampling: Any
    ) -> tuple[Answer, Answer]:
        """Move an answer after `cut` tokens; return the answers of both engines.

        When the room was reserved, the frontend had `accepted` tokens.
        """
        sampling = {"max_tokens": COUNT, **sampling}
        key, export, stopped = await pair.stopped_at(cut, tokens, **sampling)
        before = pair.source.answers[key]
        said = list(stopped.tokens[len(tokens) :])
        assert before.tokens == said, "output before `stop` returned has been delivered"
        if method == "replay":
            after = await pair.target.ask(tokens + said, prompt=len(tokens), **rest(sampling, cut))
        else:
            request = asked(0, tokens + said[:accepted], len(tokens), **rest(sampling, accepted))
            other, coming = pair.reserve(request, len(stopped.tokens) + 5)
            await pair.carry(export, stopped, coming)
            after = await pair.target.answer(other)
        pair.source.engine.cancel(key)
        assert before.tokens == said, "no output after it has stopped"
        await pair.is_empty()
        return before, after

    async def same(self, pair: Pair, tokens: list[int], cut: int, method: str, **sampling: Any) -> None:
        """Check that an answer moved after `cut` tokens is the undisturbed one.

        With its KV cache always; replayed, if the engine reports that it is exact on this processor.
        """
        if method == "replay" and not pair.source.engine.identity.exact:
            pytest.skip(
                "needs a processor on which this engine computes alike in company: it says itself that it does not here"
            )
        whole = await pair.whole(tokens, **{"max_tokens": COUNT, **sampling})
        for accepted in {0, cut // 2, cut} if method == "transfer" else {0}:
            before, after = await self.moved(pair, tokens, cut, method, accepted, **sampling)
            assert before.tokens + after.tokens == whole.tokens
            assert before.logprobs + after.logprobs == whole.logprobs
            assert (after.finish, after.error) == (whole.finish, None)

    @pytest.mark.parametrize("method", ["transfer", "replay"])
    @pytest.mark.parametrize("features", FEATURES)
    async def test_a_moved_answer_equals_the_undisturbed_one(
        self, pair: Pair, features: str, method: str
    ) -> None:
        for length, cut in ((pair.block - 5, 3), (pair.block - 5, 5), (pair.block, 9), (3 * pair.block, 2)):
            await self.same(pair, prompt(length), cut, method, **FEATURES[features])

    async def test_a_cut_at_any_place_of_a_block_changes_nothing(self, pair: Pair) -> None:
        for cut in range(2, pair.block + 4, 5):
            await self.same(pair, prompt(2 * pair.block - 3, cut), cut, "transfer")

    @pytest.mark.parametrize("method", ["transfer", "replay"])
    async def test_stop_tokens_and_min_tokens_hold_over_a_move(self, pair: Pair, method: str) -> None:
        whole = (await pair.whole(prompt(20), max_tokens=COUNT)).tokens
        stop = next(token for token in whole[8:] if token not in whole[:8])
        await self.same(pair, prompt(20), 5, method, stop_token_ids=[stop])
        await self.same(pair, prompt(20), 5, method, stop_token_ids=[whole[2]], min_tokens=12)
        await self.same(pair, prompt(20), 5, method, stop_token_ids=[whole[4], stop], min_tokens=5)

    async def test_a_moved_answer_ends_at_its_own_limit(self, pair: Pair) -> None:
        ending: dict[str, Any] = {"max_tokens": 120, "ignore_eos": False, "temperature": 1.8, "seed": 3}
        for salts in (range(at, at + 8) for at in range(0, 64, 8)):
            keys = {salt: pair.source.submit(prompt(20, salt), **ending) for salt in salts}
            wholes = {salt: await pair.source.answer(key) for salt, key in keys.items()}
            ended = [n for n, whole in wholes.items() if whole.finish == "stop" and len(whole.tokens) > 8]
            if ended:
                break
        else:
            pytest.skip("needs a model of which an answer ends by itself: none of those tried here does")
        await self.same(pair, prompt(20, ended[0]), 6, "transfer", **ending)

    async def test_an_answer_moves_twice(self, pair: Pair) -> None:
        whole = await pair.whole(prompt(), max_tokens=COUNT, **CHANCE, **PENALTIES)
        key, export, stopped = await pair.stopped_at(9, prompt(), max_tokens=COUNT, **CHANCE, **PENALTIES)
        request = asked(0, prompt(), **{"max_tokens": COUNT, **CHANCE, **PENALTIES})
        other, coming = pair.reserve(request, 60)
        await pair.carry(export, stopped, coming)
        pair.source.engine.cancel(key)
        turned = Pair(pair.target, pair.source)
        back = await turned.exported(other)
        again = await back.stop()
        last, coming = turned.reserve(request, 90)
        await turned.carry(back, again, coming)
        pair.target.engine.cancel(other)
        answer = await pair.source.answer(last)
        assert (list(again.tokens) + answer.tokens)[40:] == whole.tokens
        await pair.is_empty()

    async def test_the_context_limits_a_moved_answer_too(self, pair: Pair) -> None:
        context = pair.source.engine.identity.context_tokens
        _, after = await self.moved(pair, prompt(context - 12), 4, "transfer", max_tokens=100)
        assert (len(after.tokens), after.finish) == (8, "length")

    async def test_blocks_are_exported_while_requests_decode(self, pair: Pair) -> None:
        tokens, most = prompt(5 * pair.block), 300
        whole = await pair.whole(tokens, max_tokens=most)
        company = [pair.source.submit(prompt(30, n), max_tokens=60) for n in range(1, 4)]
        key, export = await pair.leaving(tokens, max_tokens=most)
        other, coming = pair.reserve(asked(0, tokens, max_tokens=most), len(tokens) + 280)
        shipped = [coming.cached_tokens // pair.block] * len(pair.source.engine.kv)
        async with asyncio.timeout(DEADLINE_S):
            while min(shipped) < 7:
                await pair.source.delivery()
                full = export.full_blocks()
                for shard, first in enumerate(shipped):
                    await coming.take(shard, first, await export.blocks(shard, first, full - first))
                    shipped[shard] = full
        stopped = await export.stop()
        end = -(-stopped.computed // pair.block)
        for shard, first in enumerate(shipped):
            if first < end:
                await coming.take(shard, first, await export.blocks(shard, first, end - first))
        await coming.commit(stopped.tokens, stopped.computed)
        pair.source.engine.cancel(key)
        after = await pair.target.answer(other)
        assert pair.source.answers[key].tokens + after.tokens == whole.tokens
        for one in company:
            await pair.source.answer(one)
        await pair.is_empty()

    async def test_a_full_block_never_changes(self, pair: Pair) -> None:
        _, export = await pair.leaving(prompt(3 * pair.block), max_tokens=100)
        early = [bytes(await export.blocks(shard, 1, 2)) for shard in range(len(pair.source.engine.kv))]
        await export.stop()
        late = [bytes(await export.blocks(shard, 1, 2)) for shard in range(len(pair.source.engine.kv))]
        sizes = [2 * description.block_bytes for description in pair.source.engine.kv]
        assert early == late
        assert [len(data) for data in early] == sizes

    async def test_the_unused_end_of_the_last_block_is_zeros(self, pair: Pair) -> None:
        length = pair.block + 2
        for salt in range(3):  # a reused block behaves alike
            key, export, stopped = await pair.stopped_at(2, prompt(length, salt), max_tokens=50)
            assert stopped.computed == length + 1
            for shard, description in enumerate(pair.source.engine.kv):
                last = bytes(await export.blocks(shard, 1, 1))
                used = last.count(0) / len(last)
                assert used > (pair.block - 3.5) / pair.block
                assert len(last) == description.block_bytes
            pair.source.engine.cancel(key)

    async def test_a_stopped_request_resumes_unchanged(self, pair: Pair) -> None:
        whole = await pair.whole(prompt(), max_tokens=COUNT, **CHANCE)
        key, export, _ = await pair.stopped_at(11, prompt(), max_tokens=COUNT, **CHANCE)
        export.resume()
        export.resume()
        assert (await pair.source.answer(key)).tokens == whole.tokens
        export.close()
        key, export, _ = await pair.stopped_at(11, prompt(), max_tokens=COUNT, **CHANCE)
        export.close()  # also releases a stopped one
        export.close()
        assert (await pair.source.answer(key)).tokens == whole.tokens
        await pair.is_empty()

    async def test_a_request_that_does_not_decode_cannot_leave(self, pair: Pair) -> None:
        engine = pair.source.engine
        assert engine.export(10_000) is None
        canary = pair.source.submit(prompt(), max_tokens=200, canary=True)
        fresh = pair.source.submit(prompt(30))
        assert engine.export(fresh) is None
        await pair.source.until(lambda: pair.source.answers[canary].tokens)
        assert engine.export(canary) is None
        await pair.source.answer(fresh)
        assert engine.export(fresh) is None
        engine.cancel(canary)

    async def test_a_request_has_one_export_at_a_time(self, pair: Pair) -> None:
        key, export = await pair.leaving(prompt(), max_tokens=400)
        assert pair.source.engine.export(key) is None
        await export.stop()
        assert pair.source.engine.export(key) is None
        export.close()
        again = pair.source.engine.export(key)
        assert again is not None
        pair.source.engine.cancel(key)
        await pair.is_empty()

    @pytest.mark.parametrize("end", ["cancelled", "finished"])
    async def test_an_export_ends_with_its_request(self, pair: Pair, end: str) -> None:
        key, export = await pair.leaving(prompt(2 * pair.block), max_tokens=30 if end == "finished" else 400)
        if end == "finished":
            await pair.source.answer(key)
        else:
            pair.source.engine.cancel(key)
            await pair.source.until(lambda: not pair.source.engine.load().running)
        with pytest.raises(MoveEnded):
            await export.blocks(0, 0, 1)
        with pytest.raises(MoveEnded):
            await export.stop()
        assert export.full_blocks() == 0
        export.resume()
        export.close()
        await pair.is_empty()

    async def test_blocks_stay_pinned_until_the_export_is_closed(self, pair: Pair) -> None:
        key, export = await pair.leaving(prompt(4 * pair.block), max_tokens=20)
        await pair.source.answer(key)
        await pair.source.until(lambda: not pair.source.engine.load().running)
        assert pair.source.engine.load().kv_used >= 4
        export.close()
        await pair.is_empty()

    async def test_missing_blocks_cannot_be_exported(self, pair: Pair) -> None:
        _, export, _ = await pair.stopped_at(3, prompt(pair.block + 3), max_tokens=400)
        for shard, first, count in ((0, 0, 3), (0, 2, 1), (0, -1, 1), (99, 0, 1)):
            with pytest.raises(MoveEnded, match="were requested"):
                await export.blocks(shard, first, count)

    async def test_a_target_without_room_refuses_and_keeps_nothing(self, pair: Pair) -> None:
        engine = pair.target.engine
        context, total = engine.identity.context_tokens, engine.load().kv_total
        taken: list[int] = []
        refused = ""
        for n in range(MOVES_MAX + 1):
            key = pair.target.key()
            found = engine.reserve(key, asked(0, prompt(30, n), max_tokens=2000), context)
            if isinstance(found, str):
                refused = found
                break
            taken.append(key)
        assert refused.startswith("overloaded: ")
        assert engine.load().kv_used <= total
        for one in taken:
            engine.cancel(one)
            engine.cancel(one)
        await pair.is_empty()

    @pytest.mark.parametrize("bad", ["empty", "over_context", "unknown_token", "canary"])
    async def test_a_bad_request_gets_no_room(self, pair: Pair, bad: str) -> None:
        context = pair.target.engine.identity.context_tokens
        tokens = {"empty": [], "over_context": [300] * (context + 1), "unknown_token": [300, 1_000_000]}
        request = asked(0, tokens.get(bad, prompt()), canary=bad == "canary")
        assert isinstance(pair.target.engine.reserve(pair.target.key(), request, 100), str)
        await pair.is_empty()

    async def test_an_incomplete_import_is_refused_and_leaves_nothing(self, pair: Pair) -> None:
        tokens = prompt(2 * pair.block + 5)
        _, export, stopped = await pair.stopped_at(3, tokens, max_tokens=400)
        said, computed = list(stopped.tokens), stopped.computed
        last = len(pair.source.engine.kv) - 1
        wrong: dict[str, tuple[Sequence[int], int]] = {
            "other tokens": ([said[0] + 1, *said[1:]], computed),
            "too few tokens": (said[: len(tokens) - 1], computed),
            "too many tokens": (said + [300] * 100, computed),
            "a token that is none": ([*said[:-1], 1_000_000], computed),
            "nothing computed": (said, 0),
            "too much computed": (said, len(said) + 1),
            "a block too few": (said, computed),
        }
        for what, (claimed, done) in wrong.items():
            _, coming = pair.reserve(asked(0, tokens, max_tokens=400), len(said) + 3)
            for shard in range(last + 1):
                end = 2 if (what, shard) == ("a block too few", last) else 3
                await coming.take(shard, 0, await export.blocks(shard, 0, end))
            with pytest.raises(MoveRefused):
                await coming.commit(claimed, done)
            assert pair.target.engine.load().kv_used == 0, what
            with pytest.raises(MoveRefused):
                await coming.take(0, 0, await export.blocks(0, 0, 1))
            with pytest.raises(MoveRefused):
                await coming.commit(said, computed)

    async def test_blocks_outside_the_reserved_room_are_refused(self, pair: Pair) -> None:
        size = pair.target.engine.kv[0].block_bytes
        for shard, first, length in ((0, 0, size - 1), (0, 99, size), (0, -1, size), (99, 0, size)):
            _, coming = pair.reserve(asked(0, prompt(30)), 64)
            with pytest.raises(MoveRefused, match="arrived for shard"):
                await coming.take(shard, first, bytes(length))
            assert pair.target.engine.load().kv_used == 0

    async def test_a_request_that_is_over_on_arrival_is_refused(self, pair: Pair) -> None:
        tokens = prompt(30)
        _, export, stopped = await pair.stopped_at(6, tokens, max_tokens=400)
        _, coming = pair.reserve(asked(0, tokens, max_tokens=6), 64)
        with pytest.raises(MoveRefused, match="already complete"):
            await pair.carry(export, stopped, coming)
        assert pair.target.engine.load().kv_used == 0

    @pytest.mark.parametrize("when", ["reserved", "taking", "committed"])
    async def test_cancelling_frees_arrived_blocks(self, pair: Pair, when: str) -> None:
        tokens = prompt(2 * pair.block)
        _, export, stopped = await pair.stopped_at(3, tokens, max_tokens=400)
        other, coming = pair.reserve(asked(0, tokens, max_tokens=400), 100)
        if when == "taking":
            await coming.take(0, 0, await export.blocks(0, 0, 1))
        if when == "committed":
            await pair.carry(export, stopped, coming)
        pair.target.engine.cancel(other)
        await pair.target.until(lambda: not pair.target.engine.load().kv_used)
        with pytest.raises(MoveRefused):
            await coming.commit(stopped.tokens, stopped.computed)
        assert not pair.target.answers[other].over.is_set()

    async def test_stopping_the_engine_ends_every_move(self, pair: Pair) -> None:
        _, export = await pair.leaving(prompt(2 * pair.block), max_tokens=400)
        back = Pair(pair.target, pair.source)
        _, coming = back.reserve(asked(0, prompt(30, 1)), 64)
        await pair.source.engine.stop()
        with pytest.raises(MoveEnded):
            await export.stop()
        with pytest.raises(MoveRefused):
            await coming.commit(prompt(30, 1), 29)
        export.close()

    async def test_descriptions_match_the_blocks(self, pair: Pair) -> None:
        descriptions = pair.source.engine.kv
        assert descriptions == pair.target.engine.kv
        assert [one.rank for one in descriptions] == list(range(descriptions[0].tp_size))
        assert {one.tp_size for one in descriptions} == {pair.source.engine.identity.tp}
        assert {one.block_size for one in descriptions} == {
            pair.source.engine.identity.profile.block_tokens
        } or pair.source.engine.identity.engine == "transformers"
