"""Fleets in virtual time: they match a step-by-step simulation, and the router's effects on them."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import pytest

from benchmarks.router.routing import FIRST, SPEEDS, main, shape
from benchmarks.router.virtual import trace
from benchmarks.router.virtual.fleet import (
    EVENTS_LATE_S,
    Engine,
    Fleet,
    Ideal,
    Outcome,
    figures,
    hottest,
    shortened,
    spread,
    windows,
)
from benchmarks.router.virtual.mute_scheduler import MuteScheduler
from benchmarks.router.virtual.router import Router, workers
from benchmarks.router.virtual.trace import Request
from benchmarks.router.virtual_fleet import main as ten_thousand
from controller.router.load.replicas import Replicas
from controller.router.selection.selector import Mode
from controller.trace.rows import TraceRow
from events.blocks import follow
from events.slot_messages import SlotBatch
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import Timing

BLOCK = 512
BATCH_S = 0.001  # for which frontends gather their messages to each other
SPEED = SPEEDS[FIRST]
SHAPE = shape(BLOCK)


def routers(count: int, fleet: int, *, mode: Mode = Mode.KV) -> list[Router]:
    known = workers(fleet, SPEED.profile(SHAPE))
    return [Router(known, mode, seed=number) for number in range(count)]


def ran(
    requests: Sequence[Request], fleet: int, frontends: Sequence[Router], *, told: bool = False
) -> Outcome:
    kind = SharingFleet if told else Fleet
    return kind(SHAPE, SPEED, fleet, frontends).run(requests)


class SharingFleet(Fleet):
    """A fleet with frontends that send the changes of their requests to each other, a batch per BATCH_S."""

    def __init__(self, shape: EngineShape, timing: Timing, count: int, routers: Sequence[Router]) -> None:
        super().__init__(shape, timing, count, routers)
        self._replicas = {
            router: Replicas(f"frontend-{number}", f"life-{number}", router.slots)
            for number, router in enumerate(routers)
        }
        self._sending = set[Router]()

    def arrive(self, request: Request) -> None:
        super().arrive(request)
        self._share(request.at_s)

    def land(self, engine: Engine, now: float) -> None:
        super().land(engine, now)
        self._share(now)

    def _share(self, now: float) -> None:
        for router in self._replicas.keys() - self._sending:
            self._sending.add(router)
            self._send(partial(self._gather, router), now + BATCH_S)

    def _gather(self, router: Router, now: float) -> None:
        self._sending.discard(router)
        batches = list(self._replicas[router].batches(now))
        self._send(partial(self._deliver, router, batches), now + EVENTS_LATE_S)

    def _deliver(self, sender: Router, batches: Sequence[SlotBatch], now: float) -> None:
        for router, replicas in self._replicas.items():
            for batch in batches if router is not sender else ():
                replicas.take(batch, now)


def names(seed: int, blocks: int, after: Sequence[int] = ()) -> list[int]:
    """Return a prefix's blocks followed by `blocks` unique ones."""
    found = list(after)
    for number in range(blocks):
        found.append(follow(found[-1] if found else seed, follow(seed, number)))
    return found


def chats(count: int, seed: int = 1) -> list[Request]:
    """Return requests of conversations, each longer than its predecessor in the same conversation."""
    dice, requests, known, now = Random(seed), list[Request](), dict[int, list[int]](), 0.0
    for key in range(count):
        now += dice.expovariate(2.0)
        chat = dice.randrange(20)
        known[chat] = names(key + 1, dice.randrange(1, 8), known.get(chat, names(chat + 1000, 4)))
        requests.append(
            Request(key, now, len(known[chat]) * BLOCK + 100, dice.randrange(1, 200), known[chat])
        )
    return requests


# --- virtual time


def test_every_request_gets_its_first_token_and_ends() -> None:
    requests = chats(150)
    outcome = ran(requests, 4, routers(1, 4))
    assert outcome.ttft.keys() == outcome.ended.keys() == {one.key for one in requests}
    assert all(outcome.arrived[key] + outcome.ttft[key] <= ended for key, ended in outcome.ended.items())
    assert outcome.prompt_tokens == sum(one.prompt for one in requests)
    computed = sum(sum(window.values()) for window in outcome.computed.values())
    answers = sum(one.answer for one in requests)
    first = len(requests)  # a pass that ends a prompt generates its first token, too
    assert computed == pytest.approx(outcome.prompt_tokens - outcome.cached_tokens + answers - first)


class OneStepScheduler(MuteScheduler):
    """A scheduler that announces no equal steps."""

    def steady(self) -> int:
        return 0


def test_many_steps_at_once_are_the_same_as_one_after_another() -> None:
    requests = chats(60)
    leaps = ran(requests, 2, routers(1, 2))
    fleet = Fleet(SHAPE, SPEED, 2, routers(1, 2))
    for engine in fleet.engines:
        engine.scheduler = OneStepScheduler(SHAPE)
    steps = fleet.run(requests)
    assert leaps.worker == steps.worker
    assert leaps.steps == steps.steps
    assert leaps.ended == pytest.approx(steps.ended)
    assert leaps.ttft == pytest.approx(steps.ttft)


def test_the_same_seed_gives_the_same_figures() -> None:
    one, two = (ran(chats(100), 4, routers(1, 4, mode=Mode.RANDOM)) for _ in range(2))
    assert figures(one, 4, 50.0) == pytest.approx(figures(two, 4, 50.0), nan_ok=True)


def test_a_fleet_that_refuses_everything_has_no_latencies_and_no_rate() -> None:
    too_long = [Request(0, 0.0, SHAPE.context_tokens, 1, ())]
    found = figures(ran(too_long, 2, routers(1, 2)), 2, 50.0)
    assert (found["refused"], found["requests"]) == (1, 0)
    assert all(math.isnan(found[name]) for name in ("ttft_mean", "itl_mean", "completed_per_s", "balance"))


def test_windows_share_what_lies_across_them() -> None:
    assert dict(windows(8.0, 33.0)) == pytest.approx({0: 2 / 25, 1: 10 / 25, 2: 10 / 25, 3: 3 / 25})
    assert dict(windows(10.0, 20.0)) == {1: 1.0}


def test_balance_is_the_most_that_a_worker_has_over_the_mean() -> None:
    even, one = {1: {0: 5.0, 1: 5.0}}, {1: {0: 10.0}}
    assert (spread(even, 2, 31.0), spread(one, 2, 31.0)) == (1.0, 2.0)


def test_the_hottest_worker_is_compared_with_the_others_over_the_whole_run() -> None:
    in_turn, always = {1: {0: 10.0}, 2: {1: 10.0}}, {1: {0: 10.0}, 2: {0: 10.0, 1: 5.0}}
    assert (hottest(in_turn, 2, 41.0), hottest(always, 2, 41.0)) == pytest.approx((1.0, 4 / 3))
    assert math.isnan(hottest({}, 2, 41.0))


# --- traces


ROWS = [TraceRow(0, 1100, 5, [0, 1, 2]), TraceRow(1000, 1300, 5, [0, 1, 3]), TraceRow(4000, 600, 5, [4, 5])]


def test_blocks_of_the_engines_size_are_shared_as_far_as_those_of_the_trace() -> None:
    one, two, other = trace.requests(ROWS, 64, speed=2.0)
    assert (two.at_s, len(one.names), len(two.names)) == (0.5, 1100 // 64, 1300 // 64)
    assert one.names[:16] == two.names[:16]
    assert one.names[16] != two.names[16]
    assert not {*one.names} & {*other.names}


def test_one_cache_finds_earlier_blocks_that_still_fit() -> None:
    again = list(trace.requests([*ROWS, TraceRow(5000, 1100, 5, [0, 1, 2])], BLOCK))
    assert list(trace.found(again, BLOCK, 100)) == [0, 1024, 0, 1024]
    assert list(trace.found(again, BLOCK, 1)) == [0, 512, 0, 0]


def test_copies_share_nothing_and_start_at_other_times() -> None:
    rows = list(trace.copies(ROWS, 3, seed=1))
    assert len(rows) == 9
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)
    shared = Counter(row.hash_ids[0] for row in rows)  # two of the three rows begin alike, in each copy
    assert sorted(shared.values()) == [1, 1, 1, 2, 2, 2]


# --- what the router does with a fleet


@pytest.mark.parametrize("told", [False, True])
def test_a_burst_at_eight_frontends_is_spread(told: bool) -> None:
    """A thousand different prompts at one moment: each router counts its requests at once, and none waits for updates."""
    dice = Random(3)
    sizes = [dice.randrange(1, 8) for _ in range(1000)]
    burst = [Request(key, 0.0, n * BLOCK, 20, names(key + 1, n)) for key, n in enumerate(sizes)]
    outcome = ran(burst, 64, routers(8, 64), told=told)
    tokens = Counter[int]()
    for request in burst:
        tokens[outcome.worker[request.key]] += request.prompt
    assert len(tokens) == 64
    assert max(tokens.values()) < 1.5 * sum(tokens.values()) / 64


def test_frontends_that_share_their_requests_do_not_choose_the_same_workers() -> None:
    """There is a worker for each of their requests, if every router knew which are taken."""
    burst = [Request(key, key * 0.005, 4 * BLOCK, 200, names(key + 1, 4)) for key in range(64)]
    alone, told = (
        max(Counter(ran(burst, 64, routers(8, 64), told=told).worker.values()).values())
        for told in (False, True)
    )
    assert told <= 2 < alone


def hot_prefix(rate: float) -> list[Request]:
    """Return requests that all begin with the same 8,192 tokens, for 20 s."""
    dice, now, requests, hot = Random(1), 0.0, list[Request](), names(7, 16)
    while now < 20.0:
        now += dice.expovariate(rate)
        requests.append(Request(len(requests), now, 17 * BLOCK, 100, names(len(requests) + 100, 1, hot)))
    return requests


@pytest.mark.parametrize("rate", [20.0, 60.0])
def test_a_hot_prefix_does_not_pile_up(rate: float) -> None:
    """As many workers as it keeps busy compute it, and no request waits long for the first of them."""
    requests = hot_prefix(rate)
    kv, turns = ran(requests, 8, routers(1, 8)), ran(requests, 8, routers(1, 8, mode=Mode.ROUND_ROBIN))
    counts = Counter(kv.worker.values())
    assert max(counts.values()) < 2 * len(requests) / 8
    assert kv.cached_tokens >= turns.cached_tokens
    in_kv, in_turns = figures(kv, 8, 20.0), figures(turns, 8, 20.0)
    assert in_kv["itl_mean"] < 1.2 * in_turns["itl_mean"]
    assert in_kv["ttft_mean"] < in_turns["ttft_mean"] + 0.15  # at first all wait for one to compute it: 0.7 s


def test_workers_that_are_idle_share_the_work_over_seconds() -> None:
    """Each prompt has been read and answered before the next one arrives: no load in flight distinguishes the workers."""
    dice = Random(1)
    sizes = [dice.randrange(1, 10) for _ in range(200)]
    requests = [Request(key, key * 0.5, n * BLOCK, 1, names(key + 1, 1)) for key, n in enumerate(sizes)]
    assert figures(ran(requests, 4, routers(1, 4)), 4, 100.0)["balance"] < 1.4  # 1.9 to 2.3 by chance


def test_conversations_stay_where_they_are_cached() -> None:
    requests = chats(300)
    kv = ran(requests, 4, routers(1, 4))
    turns = ran(requests, 4, routers(1, 4, mode=Mode.ROUND_ROBIN))
    assert kv.cached_tokens > 0.85 * sum(trace.found(requests, BLOCK, 10**6))
    assert figures(kv, 4, 1.0)["ttft_mean"] * 1.5 < figures(turns, 4, 1.0)["ttft_mean"]


# --- upper bounds


def lonely(prompt: int) -> list[Request]:
    """Return a long prompt in each window, and a hundred short ones beside it."""
    return [
        Request(window * 101 + number, window * 10.0 + number * 0.02, 400 if number else prompt, 1, ())
        for window in range(5)
        for number in range(101)
    ]


def ideal(requests: Sequence[Request], fleet: int) -> Ideal:
    return Ideal(requests, SHAPE, SPEED, fleet)


def test_no_placement_improves_on_one_long_prompt() -> None:
    """80,000 tokens take less than a window, and it has 120,000 for four engines: 30,000 each on average."""
    assert ideal(lonely(80_000), 4).least_balance() == pytest.approx(80 / 30, rel=1e-6)
    assert ideal(lonely(12_000), 4).least_balance() == pytest.approx(1.0)


@pytest.mark.parametrize("mode", [Mode.KV, Mode.LEAST_LOADED])
def test_neither_a_router_nor_a_hindsight_placement_is_better_than_the_bound(mode: Mode) -> None:
    requests = lonely(80_000)
    best = ideal(requests, 4)
    outcome = ran(requests, 4, routers(1, 4, mode=mode))
    least, dealt, found = best.least_balance(), best.dealt_balance(), spread(outcome.computed, 4, 40.0)
    assert least - 1e-9 <= dealt <= found + 1e-9


def test_cached_blocks_need_not_be_read() -> None:
    one, two = shortened([Request(0, 0.0, 700, 3, (1,)), Request(1, 1.0, 500, 3, ())], [512, 0])
    assert (one.prompt, one.names, two.prompt) == (188, (), 500)


# --- the commands


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--loads", "0"], "'0' is not a number above 0"),
        (["--loads", "nan"], "'nan' is not a number above 0"),
        (["--workers", "0"], "'0' is not a whole number"),
        (["--requests", "-1"], "'-1' is not a whole number"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--plot", "nowhere/plot.svg"], "its folder does not exist"),
        (["--plot", "plot.txt"], "does not end in .svg or .png"),
    ],
)
def test_bad_arguments_are_refused(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


LINE = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": [%s]}'


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([LINE % (0, 600, "1, 2")], "arrive at once"),
        ([LINE % (0, 600, "1")], "line 1: 1 hash_ids for 600 tokens"),
        (["nonsense"], "line 1"),
        ([], "holds no request"),
    ],
)
@pytest.mark.parametrize("command", [main, ten_thousand])
def test_bad_traces_are_refused(
    lines: list[str],
    why: str,
    command: Callable[[Sequence[str]], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--trace", str(written(tmp_path, *lines))])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_one_command_prints_blocks_seed_sweep_and_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, *(LINE % (n * 400, 600, f"{n % 7}, {n + 100}") for n in range(200)))
    words = ["--trace", str(path), "--workers", "2", "--loads", "0.5", "0.7", "--modes", "kv", "round-robin"]
    assert main([*words, "--seed", "5"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    bound, *runs, result, hour = rows
    assert (bound["kv_blocks"], bound["hit_rate"]) == (4096, pytest.approx(193 * 512 / (200 * 600), rel=1e-3))
    assert [(row["load"], row.get("mode")) for row in runs] == [
        (load, mode) for load in (0.5, 0.7) for mode in ("kv", "round-robin", None)
    ]
    assert {row["seed"] for row in runs if row["row"] == "run"} == {5}
    assert result["hits_of_bound"] == pytest.approx(runs[3]["hit_rate"] / bound["hit_rate"], rel=1e-3)
    assert result["ttft_better"] == pytest.approx(runs[4]["ttft_mean"] / runs[3]["ttft_mean"], rel=1e-3)
    assert hour["row"] == "hour"


def test_engines_and_seconds_are_those_requested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, *(LINE % (n * 100, 600, f"{n % 7}, {n + 100}") for n in range(400)))
    assert ten_thousand(["--trace", str(path), "--engines", "20", "--copies", "3", "--seconds", "30"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["engines"], row["virtual_s"]) == (20, 30.0)
    assert row["requests"] == pytest.approx(900, rel=0.1)  # three copies of 10 a second
    assert 0.0 < row["utilisation"] < 1.0
