"""The contract of an unchanged answer after a move: subclass `MoveContract` with a `made` fixture.

Two workers with a real engine each serve a whole frontend. With `reprefill` the first one breaks off after a number of tokens,
and the second receives the prompt and the accepted tokens. With `transfer` the answer moves with its KV cache, at that position
or a token or two later. The whole response, or every event of the stream, must equal that of an undisturbed answer: text,
finish reason, logprobs, usage, and the number and form of the choices.
"""

import asyncio
import codecs
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from frontend_kit import Kit, first_goes_to, frontend, keep_busy
from real_worker import SLOW_S, RealWorker
from scripted_worker import Act, ScriptedWorker
from transports import Road
from waits import until

from controller.frontend.openai.text.tokenizer import load_tokens
from events.observations import MoveRequested, RequestAbandoned, RequestMigrated
from events.wire import Chunk, Generate, Step
from workers.engines.engine import Engine

PROMPT = [300 + (i * 37 + i * i) % 1500 for i in range(40)]
COUNT = 24
ATTEMPTS = 8
SLOWER_MAX = 4  # times; a slower worker counts as hung
BUSY = 8  # load of the second worker, as the router sees it
CHANCE = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 7}
# penalties that depend on the answer
COUNTED = {"max_tokens": 96, "presence_penalty": 1.5, "frequency_penalty": 0.5}
TOKENS = [300, 302, 303]  # "me", "ear", "ver"
BAD_WORDS = ["meme", "earme", "verver", "mever"]  # two tokens each
REPEATED = {"max_tokens": 96, "repetition_penalty": 1.3}  # would hide what the other features forget

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded sampling": CHANCE,
    "presence and frequency penalties": COUNTED,
    "repetition penalty": REPEATED,
    "sampling with penalties": CHANCE | COUNTED | REPEATED,
    "logprobs": {"logprobs": 3},
    "logprobs of sampling": CHANCE | {"logprobs": 3},
    "biases and min_p": CHANCE | {"min_p": 0.05, "logit_bias": {"300": 6, "301": -100}},
    "allowed tokens": CHANCE | {"allowed_token_ids": [*range(300, 340)]},
    "bad words": {"max_tokens": 48, "allowed_token_ids": TOKENS, "bad_words": BAD_WORDS},
    "token ids": {"return_token_ids": True},
    "an echo": {"echo": True},
    "an echo with logprobs and token ids": {"echo": True, "logprobs": 2, "return_token_ids": True},
}


@dataclass
class EngineWorker(ScriptedWorker):
    """A worker with a real engine, which breaks off exactly where its act says."""

    engine: Engine = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keys = itertools.count(1)
        self._said: dict[int, asyncio.Queue[Chunk]] = {}

    async def start(self) -> ScriptedWorker:
        loop = asyncio.get_running_loop()

        def deliver(out: list[tuple[int, Chunk]]) -> None:
            loop.call_soon_threadsafe(self._take, out)

        await self.engine.start(deliver)
        return await super().start()

    async def stop(self) -> None:
        await super().stop()
        await self.engine.stop()

    def _take(self, out: list[tuple[int, Chunk]]) -> None:
        for key, chunk in out:
            if key in self._said:
                self._said[key].put_nowait(chunk)

    async def _play(self, writer: asyncio.StreamWriter, request: Generate, act: Act) -> None:
        key, made = next(self._keys), 0
        said = self._said[key] = asyncio.Queue()
        self.engine.submit(key, request)
        try:
            while True:
                chunk = await said.get()
                chunk.stream = request.stream
                made += len(chunk.tokens)
                self._say(writer, Step(chunks=[chunk]))
                if chunk.finish or chunk.error:
                    return
                if act.after is not None and made >= act.after:
                    await writer.drain()
                    await self._fail(writer, request, act)
                    return
        finally:
            del self._said[key]
            self.engine.cancel(key)


Made = Callable[[], Engine]


class Pair:
    """Two workers, of which the first gets every request, and the way in which an answer leaves it."""

    method = "reprefill"
    late = 0  # tokens by which a cut may be late

    def __init__(self, kit: Kit, made: Made) -> None:
        self.kit = kit
        self.cuts: list[int] = []  # number of tokens after which answers moved
        self.first, self.other = self.workers(made)

    def workers(self, made: Made) -> tuple[Any, Any]:
        """Return the two workers, not started."""
        return EngineWorker("w1", engine=made()), EngineWorker("w2", engine=made())

    async def begin(self) -> None:
        """Add both workers."""
        about = self.first.engine.identity
        facts = {"tokenizer": about.tokenizer, "engine": about.engine, "context_tokens": about.context_tokens}
        await first_goes_to(self.kit, self.first, self.other, **facts)
        self.kit.director.table.endpoints[("w2", "i1")].begin(requests=BUSY)

    def cut(self, after: int, attempt: int = 1) -> None:
        """Let the next answer move after this many tokens."""
        self.first.acts.append(Act(after=after, how="error", error="engine_shutdown"))

    async def moved(self, after: int) -> int | None:
        """Return the number of tokens after which it moved; None: it ended before."""
        fact = self.kit.said(RequestMigrated)[-1]
        assert (fact.tokens, fact.exact, fact.method) == (after, True, self.method)
        return after


class TransferPair(Pair):
    """The same with whole workers, between which the KV cache is transferred."""

    method = "transfer"
    late = 2

    def workers(self, made: Made) -> tuple[Any, Any]:
        return RealWorker("w1", made()), RealWorker("w2", made())

    async def begin(self) -> None:
        for worker in (self.first, self.other):
            await worker.start()
            await self.kit.add(worker, **worker.facts)
        keep_busy(self.kit, "w2", self.other.instance, BUSY)

    def cut(self, after: int, attempt: int = 1) -> None:
        self.first.cut(after, SLOW_S * min(attempt, SLOWER_MAX))
        self._moves = len(self.kit.said(RequestMigrated))
        self._moving = asyncio.ensure_future(self._move(after))

    async def _move(self, after: int) -> None:
        await self.first.due.wait()
        endpoint = self.kit.director.table.endpoints[("w1", self.first.instance)]
        await until(
            lambda: any(
                len(generation.accepted) >= after for generation in self.kit.director.running.at(endpoint)
            )
        )
        self.kit.tell(MoveRequested(worker="w1", instance=self.first.instance, to="w2", by="test"))

    async def moved(self, after: int) -> int | None:
        self.first.heal()
        self._moving.cancel()
        await asyncio.wait([self._moving])
        await until(lambda: self.first.empty and self.other.empty)
        facts = self.kit.said(RequestMigrated)[self._moves :]
        if not facts:
            return None
        (fact,) = facts
        assert fact.tokens >= after and (fact.exact, fact.method, fact.refused) == (True, self.method, "")
        assert fact.blocks > 0 and fact.bytes > 0
        return int(fact.tokens)


class Moving:
    """Requests answers for a suite, undisturbed and cut."""

    pairs: ClassVar[dict[str, type[Pair]]] = {"reprefill": Pair, "transfer": TransferPair}
    settings: ClassVar[dict[str, Any]] = {"moving": {"setup_s": 0.0, "max_migration_time_ms": 10_000.0}}

    @pytest.fixture
    def made(self) -> Made:
        raise NotImplementedError

    @pytest.fixture(params=list(pairs))
    async def pair(self, made: Made, road: Road, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
        """Two workers; every request goes to the first one."""
        async with frontend(road=road, **self.settings) as kit:
            pair = self.pairs[request.param](kit, made)
            await pair.begin()
            await self.answer(kit, False)  # an engine with a prefix cache knows this prompt from now on
            yield pair

    async def answer(self, kit: Kit, stream: bool, **ask: Any) -> Any:
        """Return a whole answer, or all events of a stream, without request ids."""
        usual: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": COUNT}
        ask = {**usual, "temperature": 0, "ignore_eos": True, **ask}
        if stream:
            events = await kit.stream(stream_options={"include_usage": True}, **ask)
            return [unnamed(e) for e in with_joined_ends(events)]
        status, body, _ = await kit.post("/v1/completions", **ask)
        assert status == 200, body
        return unnamed(body)

    async def same(self, pair: Pair, cuts: Sequence[int], *, unlike_plain: bool = False, **ask: Any) -> Any:
        """Check that an answer is the same when cut anywhere, whole and streamed. Return the whole one and the events."""
        kit, before = pair.kit, len(pair.kit.said(RequestMigrated))
        answers = [await self.answer(kit, stream, **ask) for stream in (False, True)]
        if unlike_plain:
            plain = await self.answer(kit, False, max_tokens=len(await self.tokens(kit, **ask)))
            assert plain != answers[0], "the feature has no effect here"
        for stream, cut in itertools.product((False, True), cuts):
            # on a busy machine an answer may end before it has moved
            for attempt in range(1, ATTEMPTS + 1):
                pair.cut(cut, attempt)
                assert await self.answer(kit, stream, **ask) == answers[stream], f"cut after {cut}"
                if (moved := await pair.moved(cut)) is not None:
                    pair.cuts.append(moved)
                    break
        assert len(kit.said(RequestMigrated)) == before + 2 * len(cuts)
        assert kit.said(RequestAbandoned) == []
        return answers

    async def tokens(self, kit: Kit, **ask: Any) -> list[int]:
        """Return the accepted tokens of an undisturbed answer."""
        await self.answer(kit, False, **ask)
        return kit.completed[-1]


class MoveContract(Moving):
    """The contract suite."""

    @pytest.mark.parametrize("feature", FEATURES)
    async def test_a_moved_answer_equals_the_undisturbed_one(self, pair: Pair, feature: str) -> None:
        ask = FEATURES[feature]
        cuts = (1, 9, COUNT - 1 - pair.late)
        whole, events = await self.same(pair, cuts, unlike_plain=feature != "greedy", **ask)
        made_tokens = ask.get("max_tokens", COUNT)
        for usage in (whole["usage"], events[-2]["usage"]):
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), made_tokens)

    async def test_an_unseeded_answer_continues_with_its_assigned_seed(self, pair: Pair) -> None:
        kit = pair.kit
        pair.cut(9, SLOWER_MAX)
        moved = await self.answer(kit, False, temperature=0.9)
        await pair.moved(9)
        seed = pair.first.requests[-1].sampling.seed
        assert pair.other.requests[-1].sampling.seed == seed is not None
        assert await self.answer(kit, False, temperature=0.9, seed=seed) == moved

    async def test_a_stop_string_is_found_across_the_cut(self, pair: Pair) -> None:
        text = (await self.answer(pair.kit, False, logprobs=1))["choices"][0]["logprobs"]["tokens"]
        words = {place: "".join(text[place : place + 3]) for place in range(4, COUNT - 4)}
        place = next(place for place, word in words.items() if "\ufffd" not in word)
        cuts = (place - pair.late, place + 1 - pair.late, place + 2 - pair.late)
        whole, events = await self.same(pair, cuts, stop=[words[place]])
        for choice in (whole["choices"][0], events[-3]["choices"][0]):
            assert choice["finish_reason"] == "stop"

    async def test_min_tokens_count_from_the_beginning_of_the_answer(self, pair: Pair) -> None:
        ends, least = sorted(set(await self.tokens(pair.kit))), 12
        plain = await self.tokens(pair.kit, stop_token_ids=ends, min_tokens=least)
        if len(plain) == COUNT:  # the stop tokens did not occur again: another one ends it
            ends.append(next(token for token in plain[least:] if token not in plain[:least]))
        cuts = (1, 9 - pair.late, 11 - pair.late)
        whole, _ = await self.same(pair, cuts, stop_token_ids=ends, min_tokens=least)
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert least < whole["usage"]["completion_tokens"] < COUNT

    async def test_a_chat_has_one_role_one_choice_and_one_end(self, pair: Pair) -> None:
        seen, kit = [], pair.kit
        messages = [{"role": "user", "content": "hello"}]
        ask: dict[str, Any] = {
            "model": "m",
            "messages": messages,
            "max_tokens": COUNT,
            "temperature": 0,
            "ignore_eos": True,
        }
        for cut in (0, 9):
            if cut:
                pair.cut(cut, SLOWER_MAX)
            events = await kit.stream("/v1/chat/completions", logprobs=True, **ask)
            seen.append([unnamed(e) for e in events])
        await pair.moved(9)
        assert seen[0] == seen[1]
        choices = [choice for event in seen[1] for choice in event.get("choices", ())]
        assert {choice["index"] for choice in choices} == {0}
        assert [choice["delta"].get("role") for choice in choices].count("assistant") == 1
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
        assert len(kit.said(RequestMigrated)) == 1


def with_joined_ends(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a stream, with each answer's end in the event of its last text.

    The end is a separate event only if the last text has been sent already, which depends on time.
    """
    found: list[dict[str, Any]] = []
    for event in events:
        choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
        shown = choice.get("text") or choice.get("delta") or choice.get("token_ids")
        if choice.get("finish_reason") is None or shown:
            found.append(event)
            continue
        same = (e for e in reversed(found) if e["choices"] and e["choices"][0]["index"] == choice["index"])
        before = next(same)["choices"][0]
        before |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return found


def unnamed(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without ids, and without the cached tokens in its usage."""
    said = {key: value for key, value in event.items() if key not in ("id", "created")}
    if usage := said.get("usage"):
        said["usage"] = {key: value for key, value in usage.items() if key != "prompt_tokens_details"}
    return said


def inside_characters(tokenizer: str, tokens: Sequence[int]) -> list[int]:
    """Return the positions at which a cut divides a character."""
    known = load_tokens(tokenizer)
    decoder, found = codecs.getincrementaldecoder("utf-8")("replace"), []
    for place, token in enumerate(tokens, 1):
        decoder.decode(known.bytes_of(token))
        if decoder.getstate()[0]:
            found.append(place)
    return found
