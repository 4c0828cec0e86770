"""The transformers engine: the engine contract, exactness, limits and rehearsed faults."""

import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from waits import turns

pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from engine_contract import EngineContract, Rig, prompt  # noqa: E402

from events.blocks import local_hashes, sequence_hashes  # noqa: E402
from events.grammar.constraint import constraint_of  # noqa: E402
from events.grammar.utf8 import unfinished  # noqa: E402
from events.kv import Cleared, Stored  # noqa: E402
from events.token_bytes import read_token_bytes  # noqa: E402
from events.wire import Generate, Sampling  # noqa: E402
from workers.engines.engine import Engine, EngineDead  # noqa: E402
from workers.engines.transformers.engine import (  # noqa: E402
    STOP_DEADLINE_S,
    TransformersEngine,
)
from workers.engines.transformers.settings import BadEngineSetting, TransformersSettings  # noqa: E402
from workers.kv_events.ledger import KvEventLedger  # noqa: E402
from workers.worker import WorkerDeadlines  # noqa: E402

MakeEngine = Callable[..., Any]
Make = Callable[..., Awaitable[Rig]]


def stepper(rig: Rig) -> Any:
    """Return an engine's stepper."""
    assert isinstance(rig.engine, TransformersEngine)
    return rig.engine.stepper


class TestTransformers(EngineContract):
    """The contract of every engine."""

    @pytest.fixture
    async def engine(self, engine_of: MakeEngine) -> Engine:
        engine: Engine = engine_of(context_tokens=512)
        return engine


class TestTransformersCrowded(EngineContract):
    """The same with a cache so small that sequences are preempted, and prompts read in small pieces."""

    @pytest.fixture
    async def engine(self, engine_of: MakeEngine) -> Engine:
        engine: Engine = engine_of(context_tokens=512, kv_tokens=256, block_tokens=16, prefill_tokens_max=24)
        return engine

    async def test_a_working_engine_reports_its_phase(self, rig: Rig) -> None:
        key = rig.submit(prompt(), max_tokens=200)
        await rig.until(lambda: rig.answers[key].tokens)
        assert rig.engine.phase().name in ("prefill", "decode")
        rig.engine.cancel(key)

    async def test_concurrent_requests_get_the_same_answers_as_alone(self, rig: Rig) -> None:
        alone = [(await rig.ask(prompt(30 + 9 * n, n), max_tokens=40)).tokens for n in range(6)]
        keys = [rig.submit(prompt(30 + 9 * n, n), max_tokens=40) for n in range(6)]
        assert [(await rig.answer(key)).tokens for key in keys] == alone
        assert stepper(rig).schedule.preemptions > 0


@pytest.fixture
async def start(engine_of: MakeEngine) -> AsyncIterator[Make]:
    """Start an engine with the given settings, and stop it in the end."""
    rigs: list[Rig] = []

    async def started(**given: Any) -> Rig:
        rigs.append(Rig(engine_of(**given)))
        await rigs[-1].start()
        return rigs[-1]

    yield started
    for rig in rigs:
        await rig.engine.stop()


async def test_its_identity(start: Make, small: Path) -> None:
    identity = (await start(model="llama", profile=None)).engine.identity
    assert (identity.model, identity.engine, identity.dtype, identity.device) == (
        "llama",
        "transformers",
        "float32",
        "cpu",
    )
    assert len(identity.revision) == 16
    assert Path(identity.tokenizer) == small
    assert identity.context_tokens == 4096
    assert identity.exact
    assert identity.profile.prefill_tokens_per_s > 10
    assert [batch for batch, _ in identity.profile.tpot_ms] in ([1], [1, 8], [1, 8, 32])


async def test_twenty_prompts_cut_at_seven_places_continue_exactly(start: Make) -> None:
    rig = await start()
    draw = random.Random(5)
    asked = [[draw.randrange(3, 2048) for _ in range(draw.randrange(8, 120))] for _ in range(20)]
    whole = [await rig.answer(key) for key in [rig.submit(tokens, max_tokens=48) for tokens in asked]]
    cuts = (1, 2, 7, 16, 31, 40, 47)
    keys = {
        (n, cut): rig.submit(tokens + whole[n].tokens[:cut], prompt=len(tokens), max_tokens=48 - cut)
        for n, tokens in enumerate(asked)
        for cut in cuts
    }
    for (n, cut), key in keys.items():
        assert whole[n].tokens[:cut] + (await rig.answer(key)).tokens == whole[n].tokens, (n, cut)


async def test_logprobs_after_a_cut_are_the_same_numbers(start: Make) -> None:
    rig = await start()
    whole = await rig.ask(prompt(33), max_tokens=24, logprobs=5)
    rest = await rig.ask(prompt(33) + whole.tokens[:11], prompt=33, max_tokens=13, logprobs=5)
    assert rest.logprobs == whole.logprobs[11:]


async def test_sampling_does_not_depend_on_the_batch(start: Make) -> None:
    rig = await start()
    chance: dict[str, Any] = {"temperature": 1.1, "top_p": 0.9, "max_tokens": 24}
    alone = [(await rig.ask(prompt(20 + n, n), seed=n, **chance)).tokens for n in range(5)]
    keys = [rig.submit(prompt(20 + n, n), seed=n, **chance) for n in range(5)]
    assert [(await rig.answer(key)).tokens for key in keys] == alone


async def test_eight_streams_are_much_faster_than_one(start: Make) -> None:
    rig = await start()
    await rig.ask(prompt(), max_tokens=8)

    async def seconds(streams: int) -> float:
        began = time.perf_counter()
        for key in [rig.submit(prompt(40, n), max_tokens=60) for n in range(streams)]:
            await rig.answer(key)
        return time.perf_counter() - began

    one, eight = min([await seconds(1) for _ in range(3)]), min([await seconds(8) for _ in range(3)])
    assert 8 * one / eight >= 1.5  # one after the other: 1; the benchmark measures nearly six


async def test_a_long_prompt_does_not_stop_the_others(start: Make) -> None:
    rig = await start(prefill_tokens_max=64)
    talker = rig.submit(prompt(), max_tokens=400)
    await rig.until(lambda: rig.answers[talker].tokens)
    before = len(rig.answers[talker].tokens)
    reader = rig.submit(prompt(1500), max_tokens=1)
    await rig.until(lambda: rig.answers[reader].tokens)
    assert len(rig.answers[talker].tokens) - before >= 1500 // 64


async def test_a_full_queue_refuses_the_next(start: Make) -> None:
    rig = await start(batch_max=2, waiting_max=3)
    keys = [rig.submit(prompt(), max_tokens=64) for _ in range(12)]
    answers = [await rig.answer(key) for key in keys]
    refused = [answer for answer in answers if answer.error]
    assert all((answer.error or "").startswith("overloaded: ") for answer in refused)
    assert 12 - 2 - 3 - 2 <= len(refused) <= 12 - 3
    assert all(answer.finish == "length" for answer in answers if answer not in refused)


async def test_a_raising_engine_ends_its_streams_and_heals(start: Make) -> None:
    rig = await start()
    key = rig.submit(prompt(), max_tokens=1000)
    await rig.until(lambda: rig.answers[key].tokens)
    assert rig.engine.chaos("error", 0.0)
    assert ((await rig.answer(key)).error or "").startswith("engine_error: ")
    assert ((await rig.ask(prompt())).error or "").startswith("engine_error: ")
    assert rig.engine.load().kv_used == 0
    rig.engine.chaos("heal", 0.0)
    assert (await rig.ask(prompt())).finish == "length"


async def test_corruption_alters_about_one_token_in_k(start: Make) -> None:
    rig = await start()
    healthy = (await rig.ask(prompt(), max_tokens=8)).tokens
    rig.engine.chaos("corrupt", 8.0)
    answers = [await rig.answer(key) for key in [rig.submit(prompt(), max_tokens=8) for _ in range(40)]]
    altered = sum(answer.tokens != healthy for answer in answers)
    assert 15 <= altered <= 38
    rig.engine.chaos("heal", 0.0)
    assert (await rig.ask(prompt(), max_tokens=8)).tokens == healthy


async def test_drift_changes_logprobs_and_no_token(start: Make) -> None:
    rig = await start()
    healthy = await rig.ask(prompt(), logprobs=5)
    rig.engine.chaos("drift", 0.0)
    drifting = await rig.ask(prompt(), logprobs=5)
    assert drifting.tokens == healthy.tokens
    assert (
        max(abs(a.chosen - b.chosen) for a, b in zip(drifting.logprobs, healthy.logprobs, strict=True)) > 1e-3
    )


async def test_a_slow_engine_takes_a_multiple_of_the_time(start: Make) -> None:
    rig = await start()

    async def seconds() -> float:
        began = time.perf_counter()
        await rig.ask(prompt())
        return time.perf_counter() - began

    await seconds()
    healthy = min([await seconds() for _ in range(3)])  # the machine may stall in one of them
    rig.engine.chaos("slow", 10.0)
    assert await seconds() > 3 * healthy


async def test_bit_flips_change_answers_until_healed(start: Make) -> None:
    rig = await start()
    healthy = await rig.ask(prompt(), logprobs=5)
    for seed in range(12):
        assert rig.engine.chaos("bitflip", float(seed))
    sick = await rig.ask(prompt(), logprobs=5)
    assert sick.error is not None or sick.logprobs != healthy.logprobs
    rig.engine.chaos("heal", 0.0)
    assert (await rig.ask(prompt(), logprobs=5)).logprobs == healthy.logprobs


async def test_a_bit_flip_asked_for_right_after_a_heal_stays(start: Make) -> None:
    rig = await start()
    healthy = await rig.ask(prompt(), logprobs=5)
    rig.engine.chaos("heal", 0.0)
    rig.engine.chaos("bitflip", 4.0)
    assert (await rig.ask(prompt(), logprobs=5)).logprobs != healthy.logprobs


async def test_non_finite_logits_are_an_error_not_an_answer(start: Make) -> None:
    rig = await start()
    weights = stepper(rig).model.parameters()
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = float("inf")
    assert ((await rig.ask(prompt())).error or "").startswith("non_finite: ")


async def test_a_step_that_keeps_raising_ends_the_engine(start: Make) -> None:
    rig = await start()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    stepper(rig).model.forward = broken
    for _ in range(3):
        await rig.engine.check()
        assert (await rig.ask(prompt())).error == (
            "engine_error: CUDA error: an illegal memory access was encountered"
        )
    with pytest.raises(EngineDead, match="3 steps in a row failed"):
        await rig.engine.check()


async def test_a_shared_prefix_is_not_recomputed_and_is_announced(start: Make) -> None:
    rig = await start(block_tokens=16)
    asked, ledger = prompt(70), KvEventLedger()
    names = sequence_hashes(local_hashes(asked, 16))
    plain = await rig.ask(asked, canary=True, max_tokens=30)
    first = await rig.ask(asked, max_tokens=30)
    await rig.until(lambda: len(rig.announced) == 3)  # the prompt's, and two that the answer has filled
    for rank, events in rig.announced:
        assert rank == 0
        ledger.record(events)
    assert ledger.refused == 0 and len(ledger) == (70 + 29) // 16 and ledger.held[:4] == names
    second = await rig.ask([*asked, 5, 6, 7], max_tokens=30)
    third = await rig.ask(asked, max_tokens=30)
    assert [answer.chunks[0].cached_tokens for answer in (plain, first, second, third)] == [0, 0, 64, 64]
    assert plain.tokens == first.tokens == third.tokens
    uncached = await start(block_tokens=16, prefix_caching=False)
    assert (await uncached.ask([*asked, 5, 6, 7], max_tokens=30)).tokens == second.tokens
    assert not uncached.announced and not uncached.engine.announces


async def test_requests_that_share_blocks_decode_together_as_if_alone(start: Make) -> None:
    rig = await start(block_tokens=16)
    asked = [[*prompt(50), *prompt(9, n)] for n in range(6)]
    alone = [(await rig.ask(one, canary=True, max_tokens=20)).tokens for one in asked]
    keys = [rig.submit(one, max_tokens=20) for one in [asked[0], *asked]]
    assert [(await rig.answer(key)).tokens for key in keys[1:]] == alone


async def test_blocks_computed_with_flipped_weights_are_not_reused_after_healing(
    start: Make,
) -> None:
    rig = await start(block_tokens=16)
    plain = await rig.ask(prompt(70), max_tokens=10)
    rig.engine.chaos("bitflip", 7.0)
    await rig.ask(prompt(70, 3), max_tokens=10)
    rig.engine.chaos("heal", 0.0)
    again = await rig.ask(prompt(70), max_tokens=10)
    assert again.tokens == plain.tokens and again.chunks[0].cached_tokens == 0
    cleared = [events for _, events in rig.announced if events[0] == Cleared()]
    assert len(cleared) == 2


async def test_earlier_blocks_are_not_reused_while_distrusted_or_afterwards(start: Make) -> None:
    rig = await start(block_tokens=16)
    found = []
    for trusted in (None, False, None, True, None):
        if trusted is not None:
            rig.engine.trust(trusted)
        found.append((await rig.ask(prompt(70), max_tokens=2)).chunks[0].cached_tokens)
    assert found == [0, 0, 0, 0, 64]
    said = [type(event) for _, events in rig.announced for event in events]
    assert said == [Stored, Cleared, Stored]


async def test_no_block_is_reused_after_a_failed_or_non_finite_step(start: Make) -> None:
    rig = await start(block_tokens=16)
    await rig.ask(prompt(70), max_tokens=10)
    weights = stepper(rig).model.parameters()["model.layers.1.mlp.down_proj.weight"]
    kept = float(weights[3, 4])
    weights[3, 4] = float("inf")
    assert ((await rig.ask(prompt())).error or "").startswith("non_finite: ")
    weights[3, 4] = kept
    assert (await rig.ask(prompt(70), max_tokens=10)).chunks[0].cached_tokens == 0


async def test_a_dead_engine_fails_its_check_and_delivers_nothing(start: Make) -> None:
    rig = await start()
    rig.engine.chaos("die", 0.0)
    key = rig.submit(prompt())
    with pytest.raises(EngineDead):
        await rig.engine.check()
    await turns()
    assert not rig.answers[key].chunks


def test_the_worker_waits_longer_than_the_engine_which_reports_the_reason() -> None:
    deadlines = WorkerDeadlines()
    assert deadlines.start_s > TransformersSettings(folder=Path()).load_s
    assert deadlines.stop_s > STOP_DEADLINE_S


async def test_an_invalid_model_folder_is_refused_with_the_reason(tmp_path: Path) -> None:
    engine = TransformersEngine(TransformersSettings(folder=tmp_path))
    with pytest.raises(EngineDead, match=r"is not a model folder.*holdfast model tiny"):
        await engine.start(lambda out: None)
    await engine.stop()


async def test_a_missing_device_is_refused_with_the_reason(tiny: Path) -> None:
    engine = TransformersEngine(TransformersSettings(folder=tiny, device="cuda:7"))
    with pytest.raises(EngineDead, match=r"cannot load the model in .* on cuda:7"):
        await engine.start(lambda out: None)
    await engine.stop()


def test_an_invalid_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadEngineSetting, match="dtype = 'int4': input should be 'float32'"):
        TransformersSettings(folder=tmp_path, dtype="int4")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_constrained_answer_fits_its_grammar_and_continues_from_every_token(
    start: Make, small: Path, temperature: float
) -> None:
    rig, known = await start(), read_token_bytes(small / "tokenizer.json")
    constraint = constraint_of({"structured_outputs": {"regex": "(yes|no), [a-z]{4,6} é{2}[0-9]"}})

    async def answer(accepted: list[int], grammar: str) -> list[int]:
        key, sampling = rig.key(), Sampling(max_tokens=40 - len(accepted), temperature=temperature, seed=5)
        guided: dict[str, object] = {"structured_outputs": {"grammar": grammar}}
        tokens = prompt() + accepted
        rig.engine.submit(key, Generate(key, "constrained", tokens, len(prompt()), sampling, guided=guided))
        found = await rig.answer(key)
        assert found.finish == "stop", found.error
        return list(found.tokens)

    whole = await answer([], constraint.ebnf)
    texts = [b"".join(known.get(token, b"") for token in whole[:cut]) for cut in range(len(whole) + 1)]
    assert re.fullmatch("(yes|no), [a-z]{4,6} é{2}[0-9]", texts[-1].decode())
    for cut in range(1, len(whole)):
        if not unfinished(texts[cut]):
            assert await answer(whole[:cut], constraint.rest(texts[cut].decode())) == whole[cut:], cut


async def test_a_constraint_that_is_no_grammar_is_refused(start: Make) -> None:
    rig = await start()
    key = rig.key()
    guided: dict[str, object] = {"response_format": {"type": "json_object"}}
    rig.engine.submit(key, Generate(key, "r", prompt(), 40, Sampling(max_tokens=4), guided=guided))
    assert "needs the constraint as a grammar" in str((await rig.answer(key)).error)
