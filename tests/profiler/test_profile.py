"""`holdfast profile`: the interpretation of answers, and the command against a real worker.

Measured speeds are tested in test_measuring.py in virtual time; here they depend on the machine.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from timed_server import LawfulServer
from waits import block_until

from controller.adapters.embedded.free_port import free_port
from controller.cli import main
from controller.profiler.sweep import NotTogether, beside_point, point
from controller.profiler.target import CannotMeasure, ProfiledStream, TargetRefused


def test_the_first_token_of_a_prompt_identifies_the_step_that_computed_it() -> None:
    answer = ProfiledStream(asked_at=0.0)
    for at in (0.010, 0.014, 0.018, 0.027, 0.031, 0.035):
        answer.record(at)
    found = beside_point(answer, _stream_with_token_at(0.0271), 16)
    assert found is not None and astuple(found) == pytest.approx((16, 9.0, 4.0))
    assert beside_point(answer, _stream_with_token_at(0.009), 16) is None  # before the answer began
    assert beside_point(answer, _stream_with_token_at(0.050), 16) is None  # after its end


def _stream_with_token_at(at: float) -> ProfiledStream:
    stream = ProfiledStream(asked_at=0.0)
    stream.record(at)
    return stream


def test_only_the_time_counts_in_which_all_are_answered() -> None:
    streams = [ProfiledStream(0.0, [n * 0.01 + late for n in range(20)], 20, 100) for late in (0.0, 0.05)]
    found = point(streams, 100, 16)
    assert (found.batch, found.asked, found.itl_ms) == pytest.approx((2, 100, 10.0))
    assert found.context == pytest.approx(100 + 2.5 + 7.0, abs=1.0)
    with pytest.raises(NotTogether):
        point([streams[0], ProfiledStream(0.0, [1.0 + n * 0.01 for n in range(20)], 20, 100)], 100, 16)


def test_a_delayed_step_and_events_that_arrive_together_do_not_count() -> None:
    steps = np.full(40, 0.01)
    steps[20] = 0.5
    held = ProfiledStream(0.0, np.cumsum(steps).tolist(), 40, 100)
    assert point([held], 100, 16).itl_ms == pytest.approx(10.0)
    for together in (2, 4, 20):
        at = np.repeat(np.arange(120 // together) * 0.01 * together, together)
        burst = ProfiledStream(0.0, at.tolist(), 120, 100)
        assert point([burst], 100, 16).itl_ms == pytest.approx(10.0, rel=0.2)
    with pytest.raises(NotTogether, match="arrive at once"):
        point([ProfiledStream(0.0, [1.0] * 40, 40, 100)], 100, 16)


async def test_a_stream_reports_how_it_ended() -> None:
    stream = ProfiledStream(asked_at=0.0)
    stream.end(TargetRefused("too long"))
    stream.end()
    with pytest.raises(TargetRefused):
        await stream.whole()
    empty = ProfiledStream(asked_at=0.0)
    empty.end()
    with pytest.raises(CannotMeasure, match="without a token"):
        await empty.whole()


# --- the command, against a real worker

ITL_MS = 12.0
PREFILL_TOKENS_PER_S = 10_000.0
CLOCK_MS = 2.0  # a worker's loop counts in milliseconds
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
    "1",
)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[str]:
    """A simulated worker with a given speed."""
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


def profiled(*arguments: Any, within_s: float = 60.0) -> int:
    """Run the command, and repeat it until the worker is there."""
    codes: list[int] = []

    def there() -> bool:
        codes.append(main(["profile", *map(str, arguments)]))
        return codes[-1] != 1

    block_until(there, within_s, every_s=0.1)
    return codes[-1]


@pytest.mark.slow
def test_a_worker_is_measured_over_its_port_and_written_down(
    worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sim.npz"
    assert profiled(worker, "-o", path, *QUICK) == 0
    with np.load(path, allow_pickle=False) as made:
        assert made["prefill_isl"].tolist() == [128, 1024]
        # no first token arrives before its prompt is computed; later tokens may arrive together
        assert (made["prefill_ttft_ms"] > made["prefill_isl"] / PREFILL_TOKENS_PER_S * 1e3 - CLOCK_MS).all()
        assert (made["decode_itl"] > 0).all() and made["pass_ms"] >= 0
        assert made["decode_context_length"][[0, -1]] == pytest.approx([1, 512], abs=24)
        assert made["decode_active_kv_tokens"][-1] == pytest.approx(4 * 512, rel=0.1)
    said = capsys.readouterr()
    assert "first token of a prompt" in said.out and str(path) in said.out.replace("\n", "")
    assert "4 at once, 512 tokens each" in said.err


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
        (["http://h:1", "-o", "p.json"], "must end with .npz"),
        (["http://h:1", "-o", "no/such/folder/p.npz"], "does not exist"),
    ],
)
def test_invalid_arguments_are_refused(
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
def test_an_unreachable_target_is_reported_in_one_sentence(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{scheme}://127.0.0.1:{free_port()}", "-o", str(tmp_path / "p.npz")]) == 1
    said = capsys.readouterr().err
    assert "cannot be reached: Connection refused\n" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


async def command(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["profile", *arguments])


async def test_a_server_with_several_models_requires_a_choice(
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
        "left out: 4090, 5000 tokens: longer than the engine's context of 4096 tokens allows"
        in capsys.readouterr().out
    )


async def test_a_server_without_room_for_any_length_is_reported(
    server: LawfulServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.context = 100
    assert await command(server.url, "-o", str(tmp_path / "p.npz"), "--isl", "512") == 1
    assert "context of 100 tokens" in capsys.readouterr().err


async def test_a_worker_is_not_a_server_and_a_server_not_a_worker(
    server: LawfulServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command(server.url.replace("http", "tcp"), "-o", str(tmp_path / "p.npz")) == 1
    assert "tcp://127.0.0.1" in capsys.readouterr().err
