"""The five modes: which worker each chooses, and that each choice counts for the next."""

from collections import Counter
from dataclasses import asdict
from random import Random
from typing import Any

import pytest
from filter_rules import Links
from router_kit import BLOCK, endpoint

from controller.router.endpoints import Endpoint, WorkerRank
from controller.router.index.index import KvIndex
from controller.router.load.active_sequences import ActiveSequences, RankWork
from controller.router.selection.score import USUAL, Pricing, ScoredPrompt
from controller.router.selection.selector import Chooser, Mode, Selection
from events.blocks import local_hashes, sequence_hashes
from events.kv import Tier
from events.wire import Load


class Router:
    """A chooser with its inputs."""

    def __init__(self, endpoints: list[Endpoint], mode: Mode = Mode.KV, **pricing: Any) -> None:
        self.endpoints, self.mode, self.pricing = endpoints, mode, Pricing(**pricing)
        self.index = KvIndex()
        self.slots = ActiveSequences()
        self.chooser = Chooser(self.slots)
        self.dice = Random(1)
        self.loads: dict[str, Load] = {}
        self.ranks: dict[str, list[Load]] = {}
        self.others = Links(
            external=lambda worker: self.loads.get(worker), by_rank=lambda worker: self.ranks.get(worker, [])
        )
        self.sent = 0

    def ask(self, tokens: list[int]) -> Selection:
        """Choose without sending."""
        blocks = sequence_hashes(local_hashes(tokens, BLOCK))
        prompt = ScoredPrompt(len(tokens), BLOCK, blocks, self.index.find(blocks))
        return self.chooser.choose(
            self.endpoints,
            prompt,
            mode=self.mode,
            pricing=self.pricing,
            now=0.0,
            draw=self.dice.random(),
            others=self.others if self.loads else None,
        )

    def send(self, tokens: list[int]) -> str:
        """Choose, and send the request. Return the worker."""
        choice = self.ask(tokens)
        self.sent += 1
        blocks = choice.request.prompt.blocks
        self.slots.add(self.sent, choice.holder, blocks, now=0.0, prefill_tokens=choice.prefill_tokens)
        choice.endpoint.begin()
        return choice.endpoint.worker

    def add_load(self, worker: str, requests: int, rank: int = 0, owner: str = "") -> None:
        """Give a worker requests in flight."""
        for number in range(requests):
            name = (f"{worker} {rank} {owner}", number)
            self.slots.add(name, WorkerRank(worker, "i1", rank), now=0.0, own_blocks=1, owner=owner)

    def cache(self, tokens: list[int], worker: str, rank: int = 0, tier: Tier = Tier.DEVICE) -> None:
        """Give a worker a prompt's blocks."""
        self.index.store(
            WorkerRank(worker, "i1", rank), None, sequence_hashes(local_hashes(tokens, BLOCK)), tier
        )


def prompt(number: int, blocks: int) -> list[int]:
    return [number] * (blocks * BLOCK)


def test_a_prompt_goes_where_it_is_cached_until_that_worker_is_too_busy() -> None:
    router = Router([endpoint("a"), endpoint("b")])
    router.cache(prompt(1, 10), "b")
    assert router.send(prompt(1, 10)) == "b"
    assert router.send(prompt(1, 10)) == "b"  # its blocks are in use there already
    for number in range(9):
        router.slots.add(
            ("laden", number), WorkerRank("b", "i1"), [100 + number], now=0.0, prefill_tokens=BLOCK
        )
    assert router.send(prompt(1, 10)) == "a"


def test_a_simultaneous_burst_is_spread() -> None:
    router = Router([endpoint(name) for name in "abcd"])
    assert set(Counter(router.send(prompt(number, 10)) for number in range(40)).values()) == {10}


def test_equal_prompts_of_a_burst_share_a_worker_only_as_far_as_it_pays() -> None:
    """As far as is known, the second of two reads the prompt again: only blocks in use are shared."""
    router = Router([endpoint("a"), endpoint("b")])
    counts = Counter(router.send(prompt(1, 10)) for _ in range(20))
    assert min(counts.values()) >= 8


def test_prompts_that_begin_alike_stay_together_before_any_event_reports_it() -> None:
    router = Router([endpoint(name, kv_events=True) for name in "abcd"], **asdict(USUAL))
    first = router.send([*prompt(1, 100), *prompt(2, 2)])
    choice = router.ask([*prompt(1, 100), *prompt(3, 2)])
    assert choice.endpoint.worker == first
    assert (choice.overlap_blocks, choice.prefill_tokens) == (100, 2 * BLOCK)


def test_the_same_prompt_again_and_again_does_not_stay_on_one_worker() -> None:
    """A prompt in use need not be read, and its blocks count once: only the number of requests has any weight."""
    router = Router([endpoint(name, kv_events=True) for name in "abcd"], **asdict(USUAL))
    counts = Counter(router.send(prompt(1, 10)) for _ in range(100))
    assert min(counts.values()) >= 20


@pytest.mark.parametrize(
    ("tier", "overlap", "cached"), [(Tier.DEVICE, 10, 160), (Tier.HOST, 7.5, 120), (Tier.DISK, 2.5, 40)]
)
def test_slower_tiers_count_in_part(tier: Tier, overlap: float, cached: int) -> None:
    router = Router([endpoint("a"), endpoint("b")])
    router.cache(prompt(1, 10), "b", tier=tier)
    choice = router.ask([*prompt(1, 10), 7])
    assert (choice.endpoint.worker, choice.overlap_blocks) == ("b", overlap)
    assert choice.prefill_tokens == choice.request.prompt.tokens - cached
    assert choice.prefill_tokens == 161 - cached
    assert choice.request.prompt.required_blocks == 11


def test_a_cached_prompt_goes_to_a_worker_of_half_the_weight_only_if_that_pays() -> None:
    for blocks_cached, chosen in ((10, "b"), (9, "a")):
        router = Router([endpoint("a", 1.0), endpoint("b", 0.51)])
        router.cache(prompt(1, blocks_cached), "b")
        assert router.ask(prompt(1, 10)).endpoint.worker == chosen


def test_every_rank_is_a_separate_candidate() -> None:
    router = Router([endpoint("a", dp=2), endpoint("b")])
    router.cache(prompt(1, 10), "a", rank=1)
    assert router.ask(prompt(1, 10)).holder == WorkerRank("a", "i1", 1)
    for _ in range(6):
        router.send(prompt(2, 10))
    assert {router.slots.work(h, now=0.0).requests for h in router.slots.holders} == {2}


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_spreads_over_all_ranks(mode: Mode) -> None:
    router = Router([endpoint("a", dp=2), endpoint("b")], mode)
    for number in range(300):
        router.send(prompt(number, 1))
    works = {holder: router.slots.work(holder, now=0.0).requests for holder in router.slots.holders}
    assert len(works) == 3
    assert min(works.values()) >= 60


def test_requests_of_other_frontends_count() -> None:
    router = Router([endpoint("a"), endpoint("b")])
    router.loads = {"a": Load(running=1, active_tokens=50 * BLOCK)}
    assert Counter(router.send(prompt(number, 1)) for number in range(20)) == {"b": 20}


BY_LOAD = [Mode.KV, Mode.LEAST_LOADED, Mode.POWER_OF_TWO]


@pytest.mark.parametrize("mode", BY_LOAD)
def test_requests_of_others_at_one_rank_count_there(mode: Mode) -> None:
    router = Router([endpoint("a", dp=2)], mode)
    busy = Load(running=3, active_tokens=50 * BLOCK)
    router.loads, router.ranks = {"a": busy}, {"a": [busy, Load()]}
    assert {router.ask(prompt(n, 1)).holder.rank for n in range(10)} == {1}
    router.ranks = {"a": [busy]}  # it has two: the rank is ambiguous
    router.chooser.forget({("a", "i1")})
    assert {router.ask(prompt(n, 1)).holder.rank for n in range(20)} == {0, 1}


@pytest.mark.parametrize("mode", BY_LOAD)
def test_requests_reported_by_other_frontends_count(mode: Mode) -> None:
    router = Router([endpoint("a"), endpoint("b")], mode)
    router.add_load("a", 3, owner="f2")
    assert {router.ask(prompt(n, 1)).endpoint.worker for n in range(10)} == {"b"}


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("dp", [0, -1, 10**12])
def test_an_invalid_number_of_ranks_does_not_prevent_serving(mode: Mode, dp: int) -> None:
    choice = Router([endpoint("a", dp=dp)], mode).ask(prompt(1, 1))
    assert 0 <= choice.holder.rank < max(1, choice.endpoint.ranks)


def test_a_temperature_sends_some_elsewhere() -> None:
    router = Router([endpoint("a"), endpoint("b")], temperature=0.5)
    router.cache(prompt(1, 10), "b")
    counts = Counter(router.ask(prompt(1, 10)).endpoint.worker for _ in range(1000))
    assert counts["a"] == pytest.approx(1000 * 0.119, abs=40)  # exp(-2) of 1 + exp(-2)


def test_a_temperature_never_draws_a_worker_of_weight_0() -> None:
    router = Router([endpoint("a"), endpoint("b", 0.0), endpoint("c"), endpoint("d")], temperature=1.0)
    router.cache(prompt(1, 10), "c")
    assert {router.ask(prompt(1, 10)).endpoint.worker for _ in range(60)} == {"a", "c", "d"}
    router.slots.add("c", WorkerRank("c", "i1"), now=0.0, own_blocks=10)  # all cost the same
    assert {router.ask(prompt(1, 10)).endpoint.worker for _ in range(60)} == {"a", "c", "d"}


def test_an_explanation_has_every_candidate_the_lowest_first() -> None:
    router = Router([endpoint("a"), endpoint("b", 0.5), endpoint("c")])
    router.cache(prompt(1, 4), "c")
    router.send(prompt(2, 1))
    choice = router.ask(prompt(1, 10))
    shown = choice.explain()
    assert shown[0][0] == choice.holder == WorkerRank("c", "i1") and len(shown) == 3
    assert [terms.cost for _, terms in shown] == sorted(terms.cost for _, terms in shown)
    assert shown[0][1].device == 4


@pytest.mark.parametrize("mode", [Mode.ROUND_ROBIN, Mode.RANDOM])
def test_modes_without_load_follow_the_weights(mode: Mode) -> None:
    router = Router([endpoint("a"), endpoint("b", 0.5), endpoint("c", 0.25)], mode)
    router.cache(prompt(1, 10), "c")
    counts = Counter(router.send(prompt(1, 10)) for _ in range(1400))
    assert [counts[name] for name in "abc"] == pytest.approx([800, 400, 200], abs=60)


def test_round_robin_gives_a_returning_worker_no_extra_turns() -> None:
    router = Router([endpoint(name) for name in "abc"], Mode.ROUND_ROBIN)
    assert [router.send(prompt(1, 1)) for _ in range(6)] == list("abcabc")
    away = router.endpoints.pop()
    assert [router.send(prompt(1, 1)) for _ in range(6)] == list("ababab")
    router.endpoints.append(away)
    assert sorted(router.send(prompt(1, 1)) for _ in range(6)) == list("aabbcc")
    router.chooser.forget({("a", "i1")})
    assert router.send(prompt(1, 1)) in set("abc")


def test_the_less_loaded_of_two_is_chosen() -> None:
    router = Router([endpoint(name) for name in "abc"], Mode.POWER_OF_TWO)
    router.add_load("a", 10)
    counts = Counter(router.ask(prompt(1, 1)).endpoint.worker for _ in range(600))
    assert "a" not in counts
    assert min(counts.values()) > 200
    router.endpoints = router.endpoints[:1]
    assert router.ask(prompt(1, 1)).endpoint.worker == "a"


def test_the_less_loaded_of_two_is_compared_by_weight_and_ranks() -> None:
    router = Router([endpoint("a"), endpoint("b", 0.25)], Mode.POWER_OF_TWO)
    router.add_load("a", 2)
    assert {router.ask(prompt(1, 1)).endpoint.worker for _ in range(20)} == {"a"}  # 3 to 1 / 0.25
    router = Router([endpoint("a"), endpoint("b", dp=8)], Mode.POWER_OF_TWO)
    router.loads = {"a": Load(running=2), "b": Load(waiting=8)}
    assert {router.ask(prompt(1, 1)).endpoint.worker for _ in range(20)} == {"b"}
    router.loads["b"] = Load(waiting=80)
    assert "a" in {router.ask(prompt(1, 1)).endpoint.worker for _ in range(100)}


def test_the_least_loaded_worker_is_chosen_by_its_weight() -> None:
    router = Router([endpoint("a"), endpoint("b", 0.5)], Mode.LEAST_LOADED)
    router.cache(prompt(1, 1), "b")
    assert Counter(router.send(prompt(1, 1)) for _ in range(30)) == {"a": 20, "b": 10}


def test_the_same_history_makes_the_same_choices() -> None:
    def history(mode: Mode) -> list[str]:
        router = Router([endpoint(name) for name in "abcde"], mode, temperature=0.3)
        return [router.send(prompt(number % 3, 4)) for number in range(50)]

    for mode in Mode:
        assert history(mode) == history(mode)


def test_a_worker_that_is_gone_gives_its_row_to_another() -> None:
    router = Router([endpoint("a"), endpoint("b")])
    for number in range(4):
        router.send(prompt(number, 5))
    router.slots.forget(WorkerRank("a", "i1"), now=0.0)
    router.endpoints = [router.endpoints[1], endpoint("c")]
    assert [router.send(prompt(9, 5)), router.send(prompt(8, 5))] == ["c", "c"]
    assert router.slots.work(WorkerRank("b", "i1"), now=0.0) == RankWork(2 * 5 * BLOCK, 10, 2)


def test_rows_are_looked_up_again_after_one_has_changed() -> None:
    router = Router([endpoint("a"), endpoint("b")])
    router.ask(prompt(1, 1))
    router.slots.forget(WorkerRank("a", "i1"), now=0.0)
    router.slots.add("elsewhere", WorkerRank("other", "i1"), now=0.0, prefill_tokens=10_000)  # where "a" was
    assert {router.ask(prompt(1, 1)).endpoint.worker for _ in range(20)} == {"a", "b"}


@pytest.mark.parametrize("mode", list(Mode))
def test_a_worker_that_comes_into_service_is_chosen_at_once(mode: Mode) -> None:
    router = Router([endpoint("a", 0.0)], mode)
    router.ask(prompt(1, 1)).explain()  # caches the weight for a moment
    router.endpoints[0].weight = 1.0
    assert router.ask(prompt(1, 1)).endpoint.worker == "a"


def test_a_match_of_many_workers_counts_for_each() -> None:
    router = Router([endpoint(f"w{n}") for n in range(40)])
    for n in range(30):
        router.cache(prompt(1, 4), f"w{n}")
    router.cache(prompt(1, 6), "w7")
    router.cache(prompt(1, 6), "not here")
    for _ in range(2):
        depths = {holder.worker: terms.device for holder, terms in router.ask(prompt(1, 10)).explain()}
        assert depths == {f"w{n}": 6 if n == 7 else 4 if n < 30 else 0 for n in range(40)}
    router.cache(prompt(1, 4), "w35")
    router.index.forget(WorkerRank("w0", "i1"))
    depths = {holder.worker: terms.device for holder, terms in router.ask(prompt(1, 10)).explain()}
    assert (depths["w0"], depths["w1"], depths["w7"], depths["w35"]) == (0, 4, 6, 4)
    router.endpoints = router.endpoints[5:]
    assert router.ask(prompt(1, 10)).endpoint.worker == "w7"


def test_without_tracked_prompts_nothing_is_to_be_read() -> None:
    router = Router([endpoint("a")], track_prefill=False)
    router.send(prompt(1, 5))
    assert router.slots.work(WorkerRank("a", "i1"), now=0.0) == RankWork(0, 5, 1)
