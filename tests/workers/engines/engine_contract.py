"""The contract of every engine. Subclass `EngineContract` and give it an `engine` fixture.

    class TestMine(EngineContract):
        @pytest.fixture
        async def engine(self): ...   # started by `rig`, stopped by it too

The central promise: an answer that was cut anywhere and continued elsewhere, with its tokens so far replayed, equals the
undisturbed answer.
"""

import asyncio
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from waits import until

from events.kv import KvEvent
from events.wire import Chunk, Generate, Load, Logprob, Sampling
from workers.engines.engine import Engine

DEADLINE_S = 30.0
START_S = 120.0  # a real model's, on a busy machine


@dataclass
class Answer:
    """What one request received, and when it ended."""

    chunks: list[Chunk] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def logprobs(self) -> list[Logprob]:
        return [logprob for chunk in self.chunks for logprob in chunk.logprobs or ()]

    @property
    def finish(self) -> str | None:
        return self.chunks[-1].finish

    @property
    def error(self) -> str | None:
        return self.chunks[-1].error


class Rig:
    """Acts as the worker around an engine: keys, deliveries from any thread, one answer per request.

    An engine with its own thread blocks after the token at which a request must halt, until `go_on`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[int, Answer] = {}
        self.deliveries = 0
        self.announced: list[
            tuple[int, list[KvEvent]]
        ] = []  # per rank, the stored and removed events of its cache
        self._keys = itertools.count(1)
        self.threaded = False  # known after the first delivery
        self.after_delivery: Callable[[], object] | None = None  # called in the same turn as a delivery
        self._said = asyncio.Event()
        self._left: dict[int, int] = {}  # tokens until a request halts
        self._goes_on = threading.Event()
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def start(self) -> None:
        async with asyncio.timeout(START_S):
            await self.engine.start(self.deliver, lambda rank, events: self.announced.append((rank, events)))

    def deliver(self, out: list[tuple[int, Chunk]]) -> None:
        if threading.get_ident() == self._thread:
            self._take(out)
            return
        self.threaded = True
        self._goes_on.clear()
        self.loop.call_soon_threadsafe(self._take, out)
        for key, chunk in out:
            if key in self._left:
                self._left[key] -= len(chunk.tokens)
                if not self._left[key]:
                    self._goes_on.wait(DEADLINE_S)

    def go_on(self) -> None:
        """Let an engine that has halted continue."""
        self._goes_on.set()

    def _take(self, out: list[tuple[int, Chunk]]) -> None:
        self.deliveries += 1
        self._said.set()
        for key, chunk in out:
            answer = self.answers[key]
            assert not answer.over.is_set(), "output after the end of an answer"
            answer.chunks.append(chunk)
            if chunk.finish or chunk.error:
                answer.over.set()
        if self.after_delivery is not None:
            self.after_delivery()

    def submit(
        self,
        tokens: list[int],
        *,
        prompt: int | None = None,
        canary: bool = False,
        prompt_text: str = "",
        traceparent: str = "",
        halt: int = 0,
        **sampling: Any,
    ) -> int:
        """Submit a request and return its key. `halt`: after this many tokens."""
        key = self.key()
        if halt:
            self._left[key] = halt
        request = asked(
            key, tokens, prompt, canary=canary, prompt_text=prompt_text, traceparent=traceparent, **sampling
        )
        self.engine.submit(key, request)
        return key

    def key(self) -> int:
        """Return an unused key, and record what is delivered under it."""
        key = next(self._keys)
        self.answers[key] = Answer()
        return key

    async def answer(self, key: int) -> Answer:
        """Wait for the end of an answer."""
        async with asyncio.timeout(DEADLINE_S):
            await self.answers[key].over.wait()
        return self.answers[key]

    async def ask(self, tokens: list[int], **rest: Any) -> Answer:
        """Submit a request and wait for the end of its answer."""
        return await self.answer(self.submit(tokens, **rest))

    async def delivery(self) -> None:
        """Wait for the next delivery. Polling in each turn of the loop would starve an engine's thread."""
        self._said.clear()
        await self._said.wait()

    async def until(self, condition: Any) -> None:
        """Wait until a condition holds."""
        await until(condition, DEADLINE_S, every_s=0.002)


def asked(
    key: int, tokens: list[int], prompt: int | None = None, *, canary: bool = False, prompt_text: str = "",
    traceparent: str = "", **sampling: Any,
) -> Generate:  # fmt: skip
    """Return a request."""
    sampling = {"max_tokens": 16, "ignore_eos": True, **sampling}
    return Generate(
        key, f"r{key}", list(tokens), prompt or len(tokens), Sampling(**sampling),
        canary=canary, prompt_text=prompt_text, traceparent=traceparent,
    )  # fmt: skip


def bad_words(*words: list[int]) -> dict[str, Any]:
    """Return the parameters that ban these words: as tokens for own engines, as texts for the double of a server."""
    texts = [" ".join(map(str, word)) for word in words]
    return {"bad_word_tokens": [*words], "bad_words": texts}


def prompt(length: int = 40, salt: int = 0) -> list[int]:
    """Return a prompt that is valid for every vocabulary of 2,048 ids."""
    return [300 + (i * 37 + salt * 101 + i * i) % 1500 for i in range(length)]


class EngineContract:
    """The suite. Greedy unless a test sets a temperature."""

    @pytest.fixture
    async def engine(self) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    async def rig(self, engine: Engine) -> AsyncIterator[Rig]:
        rig = Rig(engine)
        await rig.start()
        yield rig
        await engine.stop()

    async def test_an_answer_has_the_requested_length_and_one_end(self, rig: Rig) -> None:
        answer = await rig.ask(prompt(), max_tokens=24)
        assert (len(answer.tokens), answer.finish, answer.error) == (24, "length", None)
        assert not any(chunk.finish for chunk in answer.chunks[:-1])
        assert answer.logprobs == []

    @pytest.mark.parametrize("most", [0, 1])
    async def test_the_shortest_answers(self, rig: Rig, most: int) -> None:
        answer = await rig.ask(prompt(), max_tokens=most)
        assert (len(answer.tokens), answer.finish) == (most, "length")

    async def test_the_same_question_has_the_same_answer(self, rig: Rig) -> None:
        assert (await rig.ask(prompt())).tokens == (await rig.ask(prompt())).tokens
        assert (await rig.ask(prompt(salt=1))).tokens != (await rig.ask(prompt())).tokens

    async def test_other_requests_in_the_batch_change_nothing(self, rig: Rig) -> None:
        alone = [(await rig.ask(prompt(20 + 7 * n, n))).tokens for n in range(6)]
        keys = [rig.submit(prompt(20 + 7 * n, n)) for n in range(6)]
        assert [(await rig.answer(key)).tokens for key in keys] == alone

    @pytest.mark.parametrize("cut", [1, 5, 16, 23])
    async def test_a_cut_answer_continues_exactly(self, rig: Rig, cut: int) -> None:
        whole = (await rig.ask(prompt(33), max_tokens=24)).tokens
        rest = await rig.ask(prompt(33) + whole[:cut], prompt=33, max_tokens=24 - cut)
        assert whole[:cut] + rest.tokens == whole

    async def test_a_cut_sampled_answer_continues_exactly(self, rig: Rig) -> None:
        chance = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 7}
        whole = (await rig.ask(prompt(), max_tokens=20, **chance)).tokens
        rest = await rig.ask(prompt() + whole[:9], prompt=40, max_tokens=11, **chance)
        assert whole[:9] + rest.tokens == whole

    async def test_another_seed_is_another_answer(self, rig: Rig) -> None:
        answers = [(await rig.ask(prompt(), temperature=1.5, seed=seed)).tokens for seed in (1, 2, 1)]
        assert answers[0] != answers[1]
        assert answers[0] == answers[2]

    async def test_penalties_count_replayed_tokens(self, rig: Rig) -> None:
        penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
        whole = (await rig.ask(prompt(), max_tokens=40, **penalties)).tokens
        rest = await rig.ask(prompt() + whole[:17], prompt=40, max_tokens=23, **penalties)
        assert whole[:17] + rest.tokens == whole

    async def test_a_bias_bans_a_token_or_forces_it(self, rig: Rig) -> None:
        whole = (await rig.ask(prompt())).tokens
        first = whole.index(whole[3])
        without = await rig.ask(prompt(), logit_bias={whole[3]: -100.0})
        assert without.tokens[:first] == whole[:first]
        assert whole[3] not in without.tokens
        rare = next(token for token in range(2047, 0, -1) if token not in whole)
        assert (await rig.ask(prompt(), logit_bias={rare: 100.0})).tokens == [rare] * 16
        assert (await rig.ask(prompt(), logit_bias={whole[0]: 0.0})).tokens == whole

    async def test_a_bias_on_an_unknown_token_is_a_client_error(self, rig: Rig) -> None:
        answer = await rig.ask(prompt(), logit_bias={300: 1.0, 1_000_000: 1.0})
        assert (answer.error or "").startswith("invalid_request: ")

    async def test_only_allowed_tokens_are_generated(self, rig: Rig) -> None:
        allowed = [2000, 300, 1999, 302]
        chance = {"temperature": 1.2, "seed": 7, "allowed_token_ids": allowed, "max_tokens": 20}
        whole = (await rig.ask(prompt(), **chance)).tokens
        assert len(whole) == 20 and set(whole) <= {*allowed} and len(set(whole)) > 1
        rest = await rig.ask(prompt() + whole[:9], prompt=40, **chance | {"max_tokens": 11})
        assert whole[:9] + rest.tokens == whole
        refused = await rig.ask(prompt(), allowed_token_ids=[300, 1_000_000])
        assert (refused.error or "").startswith("invalid_request: ")

    async def test_bad_words_do_not_occur(self, rig: Rig) -> None:
        few = {"allowed_token_ids": [300, 301, 302], "temperature": 1.2, "seed": 7, "max_tokens": 30}
        whole = (await rig.ask(prompt(), **few)).tokens
        pair = whole[4:6]
        banned = few | bad_words(pair)
        without = (await rig.ask(prompt(), **banned)).tokens
        first = next(place for place, found in enumerate(pairwise(whole)) if [*found] == pair)
        assert without[: first + 1] == whole[: first + 1]
        assert (pair[0], pair[1]) not in pairwise(without) and pair[1] in without

    async def test_a_bad_word_is_found_across_a_cut(self, rig: Rig) -> None:
        few = {"allowed_token_ids": [300, 301, 302], **bad_words([300, 301], [302, 300, 302])}
        whole = (await rig.ask(prompt(), max_tokens=20, **few)).tokens
        for cut in range(1, 20):
            rest = await rig.ask(prompt() + whole[:cut], prompt=40, max_tokens=20 - cut, **few)
            assert whole[:cut] + rest.tokens == whole

    async def test_tokens_of_the_prompt_are_no_part_of_a_bad_word(self, rig: Rig) -> None:
        last = prompt()[-1]
        first = (await rig.ask(prompt(), max_tokens=1)).tokens
        assert (await rig.ask(prompt(), max_tokens=1, **bad_words([last, *first]))).tokens == first

    async def test_min_p_keeps_only_likely_tokens(self, rig: Rig) -> None:
        greedy = (await rig.ask(prompt())).tokens
        chance = {"temperature": 1.5, "seed": 3}
        assert (await rig.ask(prompt(), **chance)).tokens != greedy
        assert (await rig.ask(prompt(), min_p=1.0, **chance)).tokens == greedy

    async def test_a_cut_answer_with_biases_continues_exactly(self, rig: Rig) -> None:
        chance = {"temperature": 1.2, "seed": 7, "min_p": 0.05, "logit_bias": {300: 6.0, 301: -100.0}}
        whole = (await rig.ask(prompt(), max_tokens=20, **chance)).tokens
        for cut in (1, 9, 19):
            rest = await rig.ask(prompt() + whole[:cut], prompt=40, max_tokens=20 - cut, **chance)
            assert whole[:cut] + rest.tokens == whole

    async def test_a_stop_token_ends_the_answer_and_is_its_last_token(self, rig: Rig) -> None:
        whole = (await rig.ask(prompt())).tokens
        stop = whole[5]
        answer = await rig.ask(prompt(), stop_token_ids=[stop])
        assert answer.finish == "stop"
        assert answer.tokens == whole[: whole.index(stop) + 1]

    async def test_min_tokens_keep_the_answer_from_stopping(self, rig: Rig) -> None:
        whole = (await rig.ask(prompt())).tokens
        answer = await rig.ask(prompt(), stop_token_ids=[whole[2]], min_tokens=6)
        assert answer.tokens[:2] == whole[:2]
        assert whole[2] not in answer.tokens[:6]
        assert len(answer.tokens) > 6 or answer.finish == "length"

    async def test_logprobs_are_ranked_finite_and_include_the_chosen_token(self, rig: Rig) -> None:
        answer = await rig.ask(prompt(), logprobs=5)
        assert len(answer.logprobs) == len(answer.tokens)
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
            values = [value for _, value in logprob.top]
            assert len(values) == 5
            assert values == sorted(values, reverse=True)
            assert all(math.isfinite(value) and value <= 0 for value in values)
            assert logprob.top[0] == pytest.approx((token, logprob.chosen), abs=1e-5)

    async def test_logprobs_do_not_change_the_tokens(self, rig: Rig) -> None:
        assert (await rig.ask(prompt(), logprobs=3)).tokens == (await rig.ask(prompt())).tokens

    @pytest.mark.parametrize("top", [0, 3])
    async def test_logprobs_of_a_prompt_are_those_of_an_answer(self, rig: Rig, top: int) -> None:
        """One for each token, before those of the first generated token; that of the prompt's first has no meaning."""
        said = await rig.ask(prompt(), max_tokens=20, logprobs=3)
        whole = prompt() + said.tokens
        answer = await rig.ask(whole, max_tokens=4, prompt_logprobs=top, logprobs=1)
        assert len(answer.chunks[0].logprobs or ()) == len(whole) + len(answer.chunks[0].tokens)
        found = answer.logprobs[: len(whole)]
        for token, ours, theirs in zip(said.tokens, said.logprobs, found[40:], strict=True):
            assert theirs.chosen == pytest.approx(ours.chosen, abs=1e-5), token
            assert [t for t, _ in theirs.top] == [t for t, _ in ours.top[:top]]
        assert all(math.isfinite(one.chosen) and one.chosen < 0 for one in found[1:])
        for token, one in zip(whole[1:], found[1:], strict=True):
            listed = [other for other, _ in one.top]
            if token in listed:
                assert one.rank in (0, 1 + listed.index(token))
            else:
                assert one.rank == 0 or one.rank > len(listed)
        assert len(answer.logprobs) == len(whole) + len(answer.tokens)
        assert answer.tokens == (await rig.ask(whole, max_tokens=4)).tokens

    async def test_logprobs_of_a_prompt_cover_cached_tokens_too(self, rig: Rig) -> None:
        await rig.ask(prompt(96))
        answer = await rig.ask(prompt(96), prompt_logprobs=1, max_tokens=2)
        assert len(answer.logprobs) == 96
        assert answer.tokens == (await rig.ask(prompt(96), max_tokens=2)).tokens

    async def test_a_canary_bypasses_the_cache_and_gets_the_same_answer(self, rig: Rig) -> None:
        first = await rig.ask(prompt(96))
        canary = await rig.ask(prompt(96), canary=True)
        assert canary.tokens == first.tokens
        assert not canary.chunks[0].cached_tokens

    async def test_a_cancelled_request_is_removed_at_once(self, rig: Rig) -> None:
        key = rig.submit(prompt(), max_tokens=1500)
        await rig.until(lambda: rig.answers[key].tokens)
        rig.engine.cancel(key)
        async with asyncio.timeout(1.0):
            await rig.until(lambda: rig.engine.load().running == 0 and rig.engine.load().kv_used == 0)
        assert not rig.answers[key].over.is_set()

    async def test_a_batch_limit_holds_until_it_is_raised(self, rig: Rig) -> None:
        async def at_once(keys: list[int]) -> int:
            """Return how many of these have run at once, when all have ended successfully."""
            most, answers = 0, [rig.answers[key] for key in keys]
            while not all(answer.over.is_set() for answer in answers):
                await rig.delivery()
                most = max(most, sum(bool(a.chunks) and not a.over.is_set() for a in answers))
            assert {answer.finish for answer in answers} == {"length"}
            return most

        def widen() -> None:
            if sum(bool(rig.answers[key].chunks) for key in held) == 2:
                rig.engine.limit_batch(1.0)
                rig.after_delivery = None

        identity = rig.engine.identity
        rig.engine.limit_batch(2.5 * identity.dp / identity.profile.max_batch)
        async with asyncio.timeout(DEADLINE_S):
            assert await at_once([rig.submit(prompt(20 + n, n), max_tokens=40) for n in range(5)]) <= 2
            held = [rig.submit(prompt(20 + n, n), max_tokens=300) for n in range(5)]
            rig.after_delivery = widen
            assert await at_once(held) > 2

    async def test_cancelling_an_unknown_key_changes_nothing(self, rig: Rig) -> None:
        rig.engine.cancel(10_000)
        assert (await rig.ask(prompt())).finish == "length"

    async def test_an_engine_without_requests_is_idle_and_empty(self, rig: Rig) -> None:
        await rig.ask(prompt())
        await rig.until(lambda: rig.engine.phase().name == "idle")
        total = rig.engine.load().kv_total
        assert rig.engine.load() == Load(kv_total=total)

    async def test_a_working_engine_reports_its_phase(self, rig: Rig) -> None:
        key = rig.submit(prompt(), max_tokens=1500)
        await rig.until(lambda: rig.answers[key].tokens)
        assert rig.engine.phase().name in ("prefill", "decode")
        assert rig.engine.load().running == 1
        rig.engine.cancel(key)

    @pytest.mark.parametrize("bad", ["empty", "over_context", "unknown_token"])
    async def test_a_bad_request_is_a_client_error(self, rig: Rig, bad: str) -> None:
        context = rig.engine.identity.context_tokens
        tokens = {"empty": [], "over_context": [300] * (context + 1), "unknown_token": [300, 1_000_000]}[bad]
        answer = await rig.ask(tokens, prompt=len(tokens) or 1)
        assert answer.tokens == []
        assert (answer.error or "").startswith("invalid_request: ")

    async def test_an_answer_ends_with_the_context(self, rig: Rig) -> None:
        context = rig.engine.identity.context_tokens
        answer = await rig.ask(prompt(context - 10), max_tokens=50)
        assert (len(answer.tokens), answer.finish) == (10, "length")

    async def test_an_unknown_fault_is_refused(self, rig: Rig) -> None:
        assert not rig.engine.chaos("earthquake", 1.0)
        await rig.engine.check()

    async def test_ending_one_fault_keeps_another(self, rig: Rig) -> None:
        if not rig.engine.chaos("error", 0.0):
            return  # a fault must be injected into the server behind it instead
        rig.engine.chaos("slow", 2.0)
        rig.engine.heal("slow")
        rig.engine.heal("drift")  # which was not injected
        assert (await rig.ask(prompt())).error is not None
        rig.engine.chaos("corrupt", 1.0)
        rig.engine.heal("error")
        wrong = await rig.ask(prompt())
        rig.engine.heal("corrupt")
        right = await rig.ask(prompt())
        assert wrong.finish == right.finish == "length" and wrong.tokens != right.tokens
        rig.engine.chaos("heal", 0.0)
        assert (await rig.ask(prompt())).tokens == right.tokens

    async def test_an_engine_that_cannot_move_kv_refuses_moves(self, rig: Rig) -> None:
        if rig.engine.kv:
            return  # see engine_moves.py
        key = rig.submit(prompt(), max_tokens=200)
        await rig.until(lambda: rig.answers[key].tokens)
        assert rig.engine.export(key) is None
        assert isinstance(rig.engine.reserve(rig.key(), asked(0, prompt()), 60), str)
        rig.engine.cancel(key)
