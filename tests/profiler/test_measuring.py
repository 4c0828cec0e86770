"""Measurements of engines with known speed, in virtual time.

The load of the machine has no effect, so results can be compared exactly.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from timed_server import LawfulServer

from benchmarks.virtual_loop import VirtualLoop
from controller.profiler.flags import BESIDE, Sweep
from controller.profiler.openai_target import OpenAITarget
from controller.profiler.profile_arrays import DecodePoint, PrefillPoint, arrays
from controller.profiler.sweep import Measuring
from controller.profiler.target import CannotMeasure
from controller.profiler.worker_target import WorkerTarget
from workers.config.settings_check import load_settings
from workers.engines.build import build_engine
from workers.server import WorkerServer

LOOP = VirtualLoop
EXACT = 0.02  # a batch grows while it is measured, and the median of its steps need not be that of the middle


def now() -> float:
    return asyncio.get_running_loop().time()


def exactly(ms: float) -> Any:
    return pytest.approx(ms, rel=EXACT)


def swept(server: LawfulServer, **sweep: Any) -> tuple[OpenAITarget, Measuring]:
    target = OpenAITarget(server.url, now=now)
    chosen = Sweep(
        **{
            "lengths": (64, 1024),
            "batches": (1, 8),
            "contexts": (64, 512),
            "repeats": 1,
            "tokens": 12,
            **sweep,
        }
    )
    return target, Measuring(target, chosen, lambda what: None)


async def test_measurements_over_http_match_the_known_times(server: LawfulServer) -> None:
    target, measuring = swept(server)
    await target.open()
    await measuring.run()
    await target.close()
    assert [one.tokens for one in measuring.prefill] == [64, 1024]
    assert [one.ttft_ms for one in measuring.prefill] == [
        exactly(server.ttft_ms(64)),
        exactly(server.ttft_ms(1024)),
    ]
    assert [(one.batch, one.asked) for one in measuring.decode] == [(1, 64), (8, 64), (1, 512), (8, 512)]
    for one in measuring.decode:
        assert one.itl_ms == exactly(server.itl_ms(one.batch, one.context))
    assert [one.context - one.asked for one in measuring.decode] == pytest.approx([12] * 4, abs=12)
    for step in measuring.beside:  # an answer continues while this server computes a prompt
        assert (step.tokens, step.step_ms) == (64, exactly(step.other_ms))
    assert len(measuring.beside) == BESIDE
    assert measuring.skipped == []


async def test_all_points_are_measured_in_turn_before_any_is_measured_again(server: LawfulServer) -> None:
    told: list[str] = []
    target = OpenAITarget(server.url, now=now)
    sweep = Sweep(lengths=(16, 32), batches=(1, 2), contexts=(16,), repeats=2, tokens=8)
    measuring = Measuring(target, sweep, told.append)
    await target.open()
    await measuring.run()
    await target.close()
    once, again = told[: len(told) // 2], told[len(told) // 2 :]
    assert once == again and set(once) == {
        "a prompt of 16 tokens",
        "a prompt of 32 tokens",
        "1 at once, 16 tokens each",
        "2 at once, 16 tokens each",
        "a prompt of 16 tokens beside an answer",
    }
    assert len(told) == sweep.steps


async def test_no_prompt_is_in_any_prefix_cache(server: LawfulServer) -> None:
    target, measuring = swept(server, contexts=(64,), batches=(2, 3), lengths=(20, 40), repeats=2)
    await target.open()
    await measuring.run()
    await target.close()
    prompts = [tuple(body["prompt"]) for body in server.bodies[1:]]
    alone = [prompt for prompt in prompts if len(prompt) < 64]
    assert len({prompt[:16] for prompt in alone}) == len(alone) > 2
    seen = Counter(prompt for prompt in prompts if len(prompt) == 64)
    assert sorted(seen.values(), reverse=True)[:4] == [8, 8, 4, 1]  # each alone first, and then together


async def test_a_text_only_server_counts_its_tokens() -> None:
    server = await LawfulServer(text_only=True).start()
    target, measuring = swept(server, contexts=())
    await target.open()
    await measuring.run()
    await target.close()
    await server.stop()
    assert [one.tokens for one in measuring.prefill] == [64, 1024]
    assert isinstance(server.bodies[-1]["prompt"], str)


async def test_a_text_only_server_without_usage_cannot_be_measured() -> None:
    server = await LawfulServer(text_only=True, says_usage=False).start()
    target, _ = swept(server)
    with pytest.raises(CannotMeasure, match="does not report"):
        await target.open()
    await target.close()
    await server.stop()


async def test_tokens_without_their_own_event_are_counted() -> None:
    server = await LawfulServer(silent_tokens=3, decode=(10.0, 0.0, 0.0)).start()
    target, measuring = swept(server, batches=(2,), contexts=(64, 128), lengths=(), tokens=24)
    await target.open()
    await measuring.run()
    await target.close()
    await server.stop()
    assert [one.itl_ms for one in measuring.decode] == pytest.approx([10.0] * 2, rel=0.1)  # 24 in 16 events


async def test_batches_that_do_not_run_together_are_left_out(server: LawfulServer) -> None:
    server.batch_max = 2
    target, measuring = swept(server, batches=(2, 4, 8), contexts=(64,), lengths=())
    await target.open()
    await measuring.run()
    await target.close()
    assert [one.batch for one in measuring.decode] == [2]
    assert len(measuring.skipped) == 1 and measuring.skipped[0].startswith("4 at once, 64 tokens each")


async def test_lengths_that_the_server_refuses_are_left_out() -> None:
    server = await LawfulServer(context=1000).start()
    target, measuring = swept(server, lengths=(64, 512, 1024), contexts=())
    await target.open()
    assert target.context_tokens == 1000
    await measuring.run()
    assert [one.tokens for one in measuring.prefill] == [64, 512]
    assert "the context is exceeded" in measuring.skipped[0]
    await target.close()
    await server.stop()


async def test_answers_that_end_early_are_an_error(server: LawfulServer) -> None:
    server.obeys_ignore_eos = False
    target, measuring = swept(server)
    await target.open()
    with pytest.raises(CannotMeasure, match="ignore_eos"):
        await measuring.run()
    await target.close()


# --- Holdfast's simulated workers, by a profile

ITL_MS = 12.0
PREFILL_TOKENS_PER_S = 10_000.0
QUICK = Sweep(lengths=(128, 1024), contexts=(64, 512), batches=(1, 4), tokens=24, repeats=2)


@asynccontextmanager
async def simulated(**flags: Any) -> AsyncIterator[str]:
    """Serve a simulated worker's engine, built from these flags."""
    engine = build_engine(load_settings({name: str(value) for name, value in flags.items()}, {}))
    server = WorkerServer(worker="w0", instance="i1", engine=engine)
    await engine.start(server.deliver)
    host, port = await server.start("127.0.0.1", 0)
    try:
        yield f"tcp://{host}:{port}"
    finally:
        await server.close()
        await engine.stop()


async def profiled(url: str, sweep: Sweep = QUICK) -> dict[str, Any]:
    """Return the profile of a worker."""
    target = WorkerTarget(url, now=now)
    measuring = Measuring(target, sweep, lambda what: None)
    await target.open()
    await measuring.run()
    await target.close()
    assert measuring.skipped == []
    return arrays(measuring.prefill, measuring.decode, measuring.beside)


async def test_a_simulated_worker_has_the_configured_speed() -> None:
    async with simulated(
        itl_ms=ITL_MS, prefill_tokens_per_s=PREFILL_TOKENS_PER_S, context_tokens=2048
    ) as url:
        made = await profiled(url)
    assert made["prefill_isl"].tolist() == [128, 1024]
    assert made["prefill_ttft_ms"] == exactly(made["prefill_isl"] / PREFILL_TOKENS_PER_S * 1e3)
    assert made["decode_itl"] == exactly(np.full_like(made["decode_itl"], ITL_MS))


def law(batch: float, context: float) -> float:
    return 8.0 + 1.0 * batch + 0.004 * batch * context


async def test_an_engine_with_a_profile_is_measured_like_the_profile(tmp_path: Path) -> None:
    """A measured engine and a simulated one with its profile have the same speed."""
    prefill = [PrefillPoint(tokens, 5.0 + 0.05 * tokens) for tokens in (16, 1024)]
    decode = [DecodePoint(b, c, c, law(b, c)) for b, c in product((1, 2, 4, 8), (32, 128, 512, 1024))]
    given = tmp_path / "given.npz"
    measured: dict[str, Any] = arrays(prefill, decode)
    np.savez(given, pass_ms=np.array(3.0), **measured)
    async with simulated(planner_profile_data=given) as url:
        made = await profiled(url)
    assert made["prefill_ttft_ms"] == exactly(5.0 + 0.05 * made["prefill_isl"])
    assert made["pass_ms"] == exactly(3.0)
    contexts, actives = made["decode_context_length"], made["decode_active_kv_tokens"]
    shortest = int(np.searchsorted(contexts, 64))
    for batch, place in product((1, 4), (shortest, -1)):
        row, context = int(np.argmin(np.abs(actives - batch * contexts[place]))), contexts[place]
        assert made["decode_itl"][row, place] == exactly(law(max(1.0, actives[row] / context), context))
