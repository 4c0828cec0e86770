"""`holdfast profile` gives back how fast an engine is known to be, and says what it could not measure."""

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lawful import LawfulServer

from controller.adapters.free_port import free_port
from controller.cli import main
from controller.profiler.openai_target import OpenAITarget
from controller.profiler.points import BesidePoint, DecodePoint, PrefillPoint, arrays
from controller.profiler.sweep import Measuring, NotTogether, Sweep, beside_point, point
from controller.profiler.target import CannotMeasure, Refused, Stream

SLOWER = 2.5  # what a busy machine may add, as a factor, and in ms; it is hardly ever quicker: what is late is caught up with
LATE_MS = 25.0


def about(measured: float, known: float) -> bool:
    """Whether something takes as long as it is known to, on a machine with other things to do."""
    return known * 0.8 - 0.5 <= measured <= known * SLOWER + LATE_MS


@pytest.fixture
async def server() -> AsyncIterator[LawfulServer]:
    server = await LawfulServer().start()
    yield server
    await server.stop()


def swept(server: LawfulServer, **sweep: Any) -> tuple[OpenAITarget, Measuring]:
    target = OpenAITarget(server.url)
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


async def test_what_is_measured_over_http_is_what_is_known(server: LawfulServer) -> None:
    target, measuring = swept(server)
    await target.open()
    await measuring.run()
    await target.close()
    assert [one.tokens for one in measuring.prefill] == [64, 1024]
    assert all(about(one.ttft_ms, server.ttft_ms(one.tokens)) for one in measuring.prefill)
    assert [(one.batch, one.asked) for one in measuring.decode] == [(1, 64), (8, 64), (1, 512), (8, 512)]
    assert all(about(one.itl_ms, server.itl_ms(one.batch, one.context)) for one in measuring.decode)
    assert measuring.skipped == []


async def test_all_points_are_measured_in_turn_before_any_is_measured_again(server: LawfulServer) -> None:
    told: list[str] = []
    target = OpenAITarget(server.url)
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


async def test_a_server_that_takes_text_only_counts_its_tokens_itself() -> None:
    server = await LawfulServer(text_only=True).start()
    target, measuring = swept(server, contexts=())
    await target.open()
    await measuring.run()
    await target.close()
    await server.stop()
    assert [one.tokens for one in measuring.prefill] == [64, 1024]
    assert isinstance(server.bodies[-1]["prompt"], str)


async def test_a_server_that_takes_text_and_counts_nothing_cannot_be_measured() -> None:
    server = await LawfulServer(text_only=True, says_usage=False).start()
    target, _ = swept(server)
    with pytest.raises(CannotMeasure, match="does not count"):
        await target.open()
    await target.close()
    await server.stop()


async def test_tokens_without_an_event_of_their_own_are_counted() -> None:
    server = await LawfulServer(silent_tokens=3, decode=(10.0, 0.0, 0.0)).start()
    target, measuring = swept(server, batches=(2,), contexts=(64, 128), lengths=(), tokens=24)
    await target.open()
    await measuring.run()
    await target.close()
    await server.stop()
    assert len(measuring.decode) == 2 and all(about(one.itl_ms, 10.0) for one in measuring.decode)


async def test_batches_that_do_not_run_together_are_left_out(server: LawfulServer) -> None:
    server.batch_max = 2
    target, measuring = swept(server, batches=(2, 4, 8), contexts=(64,), lengths=())
    await target.open()
    await measuring.run()
    await target.close()
    assert [one.batch for one in measuring.decode] == [2]
    assert len(measuring.skipped) == 1 and measuring.skipped[0].startswith("4 at once, 64 tokens each")


def test_the_step_that_computed_a_prompt_is_known_by_its_first_token() -> None:
    answer = Stream(asked_at=0.0)
    for at in (0.010, 0.014, 0.018, 0.027, 0.031, 0.035):
        answer.said(at)
    assert beside_point(answer, _said(0.0271), 16) == BesidePoint(16, pytest.approx(9.0), pytest.approx(4.0))
    assert beside_point(answer, _said(0.009), 16) is None  # before the answer began
    assert beside_point(answer, _said(0.050), 16) is None  # and after its end


def _said(at: float) -> Stream:
    stream = Stream(asked_at=0.0)
    stream.said(at)
    return stream


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


def test_only_the_time_counts_in_which_all_answer() -> None:
    streams = [Stream(0.0, [n * 0.01 + late for n in range(20)], 20, 100) for late in (0.0, 0.05)]
    found = point(streams, 100, 16)
    assert found == DecodePoint(2, 100, pytest.approx(100 + 2.5 + 7.0, abs=1.0), pytest.approx(10.0))
    with pytest.raises(NotTogether):
        point([streams[0], Stream(0.0, [1.0 + n * 0.01 for n in range(20)], 20, 100)], 100, 16)


def test_a_step_that_was_held_up_and_events_that_come_together_do_not_count() -> None:
    steps = np.full(40, 0.01)
    steps[20] = 0.5
    held = Stream(0.0, np.cumsum(steps).tolist(), 40, 100)
    assert point([held], 100, 16).itl_ms == pytest.approx(10.0)
    for together in (2, 4, 20):
        at = np.repeat(np.arange(120 // together) * 0.01 * together, together)
        burst = Stream(0.0, at.tolist(), 120, 100)
        assert point([burst], 100, 16).itl_ms == pytest.approx(10.0, rel=0.2)
    with pytest.raises(NotTogether, match="all at once"):
        point([Stream(0.0, [1.0] * 40, 40, 100)], 100, 16)


async def test_a_stream_says_how_it_ended() -> None:
    stream = Stream()
    stream.end(Refused("too long"))
    stream.end()
    with pytest.raises(Refused):
        await stream.whole()
    empty = Stream()
    empty.end()
    with pytest.raises(CannotMeasure, match="without a token"):
        await empty.whole()


# --- the command, against a real worker

ITL_MS = 12.0
PREFILL_TOKENS_PER_S = 10_000.0
QUICK = (
    "--isl",
    "128,1024",
    "--context",
    "64,512",
    "--concurrency",
    "1,4",
    "--tokens",
    "24",
    "--repeats",
    "2",
)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[str]:
    """A simulated worker of its own, as fast as it is told."""
    flags = ("--itl-ms", ITL_MS, "--prefill-tokens-per-s", PREFILL_TOKENS_PER_S, "--context-tokens", 2048)
    with simulated(tmp_path, *flags) as url:
        yield url


@contextmanager
def simulated(tmp_path: Path, *flags: Any) -> Iterator[str]:
    """Run a simulated worker."""
    port = free_port()
    where = ("--port", port, "--admin-port", -1, "--data", tmp_path / "fleet")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "workers", *map(str, (*flags, *where))],
            env={name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")},
            stdout=log,
            stderr=log,
        )
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def profiled(*arguments: Any, within_s: float = 30.0) -> int:
    """Run the command, again while there is nobody yet."""
    until = time.monotonic() + within_s
    while (code := main(["profile", *map(str, arguments)])) == 1 and time.monotonic() < until:
        time.sleep(0.1)
    return code


def test_a_simulated_worker_is_as_fast_as_it_was_told_to_be(
    worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sim.npz"
    assert profiled(worker, "-o", path, *QUICK) == 0
    with np.load(path, allow_pickle=False) as made:
        assert made["prefill_isl"].tolist() == [128, 1024]
        for tokens, ttft_ms in zip(made["prefill_isl"], made["prefill_ttft_ms"], strict=True):
            assert about(ttft_ms, tokens / PREFILL_TOKENS_PER_S * 1e3)
        assert about(float(np.median(made["decode_itl"])), ITL_MS)
        assert made["decode_context_length"][[0, -1]] == pytest.approx([1, 512], abs=24)
        assert made["decode_active_kv_tokens"][-1] == pytest.approx(4 * 512, rel=0.1)
    said = capsys.readouterr()
    assert "first token of a prompt" in said.out and str(path) in said.out.replace("\n", "")
    assert "4 at once, 512 tokens each" in said.err


def law(batch: float, context: float) -> float:
    return 8.0 + 1.0 * batch + 0.004 * batch * context


def test_what_a_profile_says_is_measured_of_who_follows_it(tmp_path: Path) -> None:
    """An engine that is measured, and a simulated one with that profile, are as fast as each other."""
    prefill = [PrefillPoint(tokens, 5.0 + 0.05 * tokens) for tokens in (16, 1024)]
    decode = [DecodePoint(b, c, c, law(b, c)) for b, c in product((1, 2, 4, 8), (32, 128, 512, 1024))]
    given, measured = tmp_path / "given.npz", tmp_path / "measured.npz"
    np.savez(given, **arrays(prefill, decode))
    with simulated(tmp_path, "--planner-profile-data", given) as url:
        assert profiled(url, "-o", measured, *QUICK) == 0
    with np.load(measured, allow_pickle=False) as made:
        for tokens, ttft_ms in zip(made["prefill_isl"], made["prefill_ttft_ms"], strict=True):
            assert about(ttft_ms, 5.0 + 0.05 * tokens)
        contexts, actives = made["decode_context_length"], made["decode_active_kv_tokens"]
        shortest = int(np.searchsorted(contexts, 64))
        for batch, place in product((1, 4), (shortest, -1)):
            row = int(np.argmin(np.abs(actives - batch * contexts[place])))
            assert about(float(made["decode_itl"][row, place]), law(batch, float(contexts[place])))


def test_lengths_beyond_a_workers_context_are_left_out_with_the_reason(
    worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--isl",
        "64,128,3000",
        "--context",
        "32,64,3000",
        "--concurrency",
        "1",
        "--tokens",
        "5",
        "--repeats",
        "1",
    )
    assert profiled(worker, "-o", tmp_path / "sim.npz", *flags) == 0
    said = capsys.readouterr().out
    assert "left out: prompts of 3000 tokens: the worker answers: invalid_request" in said
    assert "left out: 1 at once, 3000 tokens each" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ftp://h", "-o", "p.npz"], "neither a server"),
        (["tcp://h", "-o", "p.npz"], "neither a server"),
        (["http://h:x", "-o", "p.npz"], "neither a server"),
        (["http://h:1", "-o", "p.json"], "ends with .npz"),
        (["http://h:1", "-o", "no/such/folder/p.npz"], "does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("flag", [("--isl", "64,x"), ("--repeats", "0"), ("--concurrency", "")])
def test_flags_must_be_numbers(flag: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "http://h:1", "-o", "p.npz", *flag])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("scheme", ["tcp", "http"])
def test_nobody_there_is_said_in_one_sentence(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{scheme}://127.0.0.1:{free_port()}", "-o", str(tmp_path / "p.npz")]) == 1
    said = capsys.readouterr().err
    assert "cannot be reached" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


async def command(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["profile", *arguments])


async def test_a_server_of_several_models_wants_one_chosen(
    server: LawfulServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = ("one", "two")
    path = str(tmp_path / "p.npz")
    assert await command(server.url, "-o", path) == 1
    assert "choose one with --model (one, two)" in capsys.readouterr().err
    assert await command(server.url, "-o", path, "--model", "three") == 1
    assert "serves one, two, not three" in capsys.readouterr().err


async def test_lengths_beyond_a_servers_context_are_named(
    server: LawfulServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--isl",
        "64,128,5000",
        "--context",
        "32,64,4000,4090",
        "--concurrency",
        "1",
        "--tokens",
        "6",
        "--repeats",
        "1",
    )
    assert await command(server.url, "-o", str(tmp_path / "p.npz"), *flags) == 0
    assert (
        "left out: 4090, 5000 tokens: more than its context of 4096 tokens has room for"
        in capsys.readouterr().out
    )


async def test_a_server_without_room_for_any_length_is_said(
    server: LawfulServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.context = 100
    assert await command(server.url, "-o", str(tmp_path / "p.npz"), "--isl", "512") == 1
    assert "context of 100 tokens" in capsys.readouterr().err


async def test_a_worker_is_no_server_and_a_server_no_worker(
    server: LawfulServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command(server.url.replace("http", "tcp"), "-o", str(tmp_path / "p.npz")) == 1
    assert "tcp://127.0.0.1" in capsys.readouterr().err
