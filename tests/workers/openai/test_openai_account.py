"""An upstream's metrics and KV events, and their use by the openai engine."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_contract import Answer, Rig, prompt
from upstream import Upstream
from vllm_events import Publisher, removed, stored
from waits import until

from events import blocks
from events.errors import BadSetting
from events.kv import Cleared, KvEvent, Removed, Stored
from events.wire import Generate, Load, Sampling
from workers.admin.server import WorkerMetrics
from workers.config.settings_check import load_settings
from workers.engines.engine import EngineChanged
from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.kv_names import CANARY_SALT, salt_of
from workers.engines.openai.upstream import NoHandle
from workers.engines.openai.upstream import Upstream as Client
from workers.engines.openai.upstream_metrics import (
    STALE_S,
    UpstreamLoad,
    UpstreamRankLoad,
    UpstreamReport,
    rank_loads,
    read_metrics,
)
from workers.engines.openai.upstream_reports import AccountTimes, UpstreamAccount

Eventually = Callable[..., Awaitable[None]]

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"quoted\\" name"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="400",sliding_window="None"} 1.0
"""
SGLANG = """sglang:num_running_reqs{model_name="m",tp_rank="0",dp_rank="0"} 4
sglang:num_running_reqs{model_name="m",tp_rank="1",dp_rank="0"} 4
sglang:num_running_reqs{model_name="m",tp_rank="0",dp_rank="1"} 1
sglang:num_queue_reqs{model_name="m",tp_rank="0",dp_rank="0"} 5
sglang:token_usage{model_name="m",tp_rank="0",dp_rank="0"} 0.5
"""
LLAMACPP = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n"


# --- metrics


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (VLLM, UpstreamReport((UpstreamRankLoad(3, 2, 0.25),), 32, 400)),
        (
            VLLM.replace("kv_cache_usage", "gpu_cache_usage"),
            UpstreamReport((UpstreamRankLoad(3, 2, 0.25),), 32, 400),
        ),
        (SGLANG, UpstreamReport((UpstreamRankLoad(4, 5, 0.5), UpstreamRankLoad(1, 0, None)))),
        (LLAMACPP, UpstreamReport((UpstreamRankLoad(1, 2, None),))),
        ("", None),
        ("up 1\n", None),
        ("<html>vllm:num_requests_running 3</html>", None),
        ("vllm:num_requests_running NaN\n", None),
        ("vllm:num_requests_running many\n", None),
        (
            "vllm:num_requests_running 2\nvllm:kv_cache_usage_perc +Inf\n",
            UpstreamReport((UpstreamRankLoad(2, 0, None),)),
        ),
        ("vllm:num_requests_running 1e30\n", None),
        *(
            (VLLM.replace('"400"', f'"{blocks}"'), UpstreamReport((UpstreamRankLoad(3, 2, 0.25),), 32, None))
            for blocks in ("None", "0", "-1", "²", "9" * 30, "9" * 5000)
        ),
        (
            f"llamacpp:requests_processing{{{'a' * 200_000}}} 3\n",
            UpstreamReport((UpstreamRankLoad(3),)),
        ),  # not in minutes
    ],
)
def test_the_load_is_read_from_every_servers_metrics(text: str, said: UpstreamReport | None) -> None:
    assert read_metrics(text) == said


def test_ranks_are_in_order() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{n}"}} {n}\n' for n in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)
    )
    said = read_metrics(text)
    assert said is not None and [rank.running for rank in said.ranks] == list(range(11))


def test_a_report_is_used_for_a_limited_time() -> None:
    load, said = UpstreamLoad(), UpstreamReport((UpstreamRankLoad(1),))
    assert load.fresh(0.0) is None
    load.take(said, 0, 100.0)
    load.take(None, 0, 101.0)
    assert load.fresh(100.0 + STALE_S) == said
    assert load.fresh(100.1 + STALE_S) is None


@pytest.mark.parametrize(
    ("own", "then", "ranks", "expected"),
    [
        (
            Load(2, 0, 9, 100, 70),
            2,
            [UpstreamRankLoad(6, 3, 0.5)],
            Load(6, 3, 50, 100, 70),
        ),  # others have 7 there
        (
            Load(0, 0, 9, 100, 0),
            2,
            [UpstreamRankLoad(6, 3, 0.5)],
            Load(6, 1, 50, 100, 0),
        ),  # this worker's are over since
        (
            Load(4, 0, 9, 100, 70),
            2,
            [UpstreamRankLoad(3, 0, None)],
            Load(5, 0, 9, 100, 70),
        ),  # two have arrived since
        (Load(8, 4, 9, 100, 70), 0, [UpstreamRankLoad(0, 0, None)], Load(8, 4, 9, 100, 70)),
        (Load(0, 0, 0, 100), 3, [UpstreamRankLoad(3, 0, 0.0)], Load(0, 0, 0, 100)),
        (
            Load(5, 0, 9, 100, 70),
            5,
            [UpstreamRankLoad(3, 0, None)],
            Load(5, 0, 9, 100, 70),
        ),  # it has not counted two yet
        (
            Load(0, 0, 0, 100),
            0,
            [UpstreamRankLoad(1, 2, 0.5), UpstreamRankLoad(3, 0, 1.5)],
            Load(4, 2, 100, 100),
        ),
    ],
)
def test_other_clients_requests_are_added_to_this_workers(
    own: Load, then: int, ranks: list[UpstreamRankLoad], expected: Load
) -> None:
    load = UpstreamLoad()
    assert load.combined(own, 8, 0.0) == own
    load.take(UpstreamReport(tuple(ranks)), then, 0.0)
    assert load.combined(own, 8, 0.0) == expected
    assert load.combined(own, 8, STALE_S + 1.0) == own


def test_each_rank_has_its_load() -> None:
    said = UpstreamReport((UpstreamRankLoad(1, 2, 0.5), UpstreamRankLoad(3, 0, None)))
    assert rank_loads(said, 100) == [Load(1, 2, 50, 100), Load(3, 0, 0, 100)]


# --- the engine


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = await Upstream(metrics=VLLM).start()
    yield server
    await server.stop()


@pytest.fixture
def publisher(upstream: Upstream) -> Iterator[Publisher]:
    """The upstream's prefix cache: it stores whole blocks of 32 tokens of every prompt."""
    publisher = Publisher()

    def store(tokens: list[int], salt: str) -> None:
        whole = len(tokens) // 32 * 32
        names = blocks.sequence_hashes(blocks.local_hashes(tokens[:whole], 32, blocks.seed(namespace=salt)))
        if names:  # its own names, unlike Holdfast's
            extras = [[salt] if salt else None, *[None] * (len(names) - 1)]
            publisher.publish(stored([name ^ 1 for name in names], tokens[:whole], 32, extra_keys=extras))

    upstream.stored = store
    yield publisher
    publisher.close()


class Heard:
    """Records the engine's announcements."""

    def __init__(self) -> None:
        self.events: list[tuple[int, KvEvent]] = []

    def __call__(self, rank: int, events: list[KvEvent]) -> None:
        self.events.extend((rank, event) for event in events)


async def started(upstream: Upstream, heard: Heard, **settings: Any) -> Rig:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url, **settings)))
    await rig.engine.start(rig.deliver, heard)
    return rig


async def ask(rig: Rig, tokens: list[int], **about: Any) -> Answer:
    key = rig.key()
    rig.engine.submit(key, Generate(key, "r", tokens, len(tokens), Sampling(max_tokens=4), **about))
    return await rig.answer(key)


async def test_blocks_of_prompts_are_announced_but_not_of_canaries(
    upstream: Upstream, publisher: Publisher, eventually: Eventually
) -> None:
    heard = Heard()
    rig = await started(
        upstream, heard, kv_events=[publisher.endpoint], kv_replays=[publisher.replay_endpoint]
    )
    assert rig.engine.announces
    assert (rig.engine.identity.profile.block_tokens, rig.engine.identity.dp) == (32, 1)
    tokens = prompt(70)
    await ask(rig, tokens, canary=True)
    await ask(rig, tokens)
    names = blocks.sequence_hashes(blocks.local_hashes(tokens, 32))
    await eventually(lambda: heard.events == [(0, Stored(names))])
    publisher.publish(removed([names[1] ^ 1]))
    await eventually(lambda: heard.events[1:] == [(0, Removed(names[1:]))])
    await rig.engine.stop()


async def test_a_salted_prompt_has_its_own_names(
    upstream: Upstream, publisher: Publisher, eventually: Eventually
) -> None:
    heard = Heard()
    rig = await started(upstream, heard, kv_events=[publisher.endpoint])
    tokens = prompt(40)
    await ask(rig, tokens, cache_salt="tenant")
    seed = blocks.seed(namespace="tenant")
    names = blocks.sequence_hashes(blocks.local_hashes(tokens, 32, seed))
    await eventually(lambda: heard.events == [(0, Stored(names))])
    await rig.engine.stop()


async def test_a_prompt_with_an_unreported_salt_has_no_names(
    upstream: Upstream, publisher: Publisher, eventually: Eventually
) -> None:
    """An earlier version of vLLM."""
    heard, tell = Heard(), upstream.stored
    assert tell is not None
    upstream.stored = lambda tokens, salt: tell(tokens, "")
    rig = await started(upstream, heard, kv_events=[publisher.endpoint])
    await ask(rig, prompt(70), cache_salt="tenant")
    await ask(rig, prompt(70, 1), canary=True)
    await ask(rig, prompt(70, 2))
    salted, canary, plain = (
        blocks.sequence_hashes(blocks.local_hashes(prompt(70, number), 32)) for number in range(3)
    )
    await eventually(lambda: heard.events[-1:] == [(0, Stored(plain))])
    said = {name for _, event in heard.events if isinstance(event, Stored) for name in event.blocks}
    assert said.isdisjoint(salted) and said.isdisjoint(canary)
    await rig.engine.stop()


async def test_after_a_conviction_nothing_is_reused_or_left_in_the_upstreams_cache(
    upstream: Upstream, publisher: Publisher, eventually: Eventually
) -> None:
    heard = Heard()
    rig = await started(upstream, heard, kv_events=[publisher.endpoint])
    tokens = prompt(70)
    await ask(rig, tokens)
    names = blocks.sequence_hashes(blocks.local_hashes(tokens, 32))
    await eventually(lambda: heard.events == [(0, Stored(names))])
    for trusted in (False, True):
        rig.engine.trust(trusted)
        for salt in ("", "tenant"):
            await ask(rig, tokens, cache_salt=salt)
    salts = [body["cache_salt"] for body in upstream.bodies[-4:]]
    assert len(set(salts)) == 4 and all(salt.startswith(CANARY_SALT) for salt in salts)
    publisher.publish(stored([99], tokens[:32], 32))  # by another client
    await eventually(lambda: heard.events[1:] == [(0, Cleared()), (0, Cleared()), (0, Stored(names[:1]))])
    await ask(rig, tokens, cache_epoch=7)  # of that conviction
    assert upstream.bodies[-1]["cache_salt"] == salt_of(7, "")
    await eventually(lambda: heard.events[4:] == [(0, Cleared()), (0, Stored(names))])
    await rig.engine.stop()


async def test_the_next_worker_of_a_convicted_server_reuses_nothing_older(
    upstream: Upstream, publisher: Publisher, eventually: Eventually
) -> None:
    heard = Heard()
    rig = await started(upstream, heard, kv_events=[publisher.endpoint])
    tokens = prompt(70)
    plain, tenant = (
        blocks.sequence_hashes(blocks.local_hashes(tokens, 32, blocks.seed(namespace=own)))
        for own in ("", "t")
    )
    await ask(rig, tokens)
    for epoch, own in ((5, ""), (5, "t"), (0, "")):  # the last of a frontend with older state
        await ask(rig, tokens, cache_epoch=epoch, cache_salt=own)
    salts = [body.get("cache_salt", "") for body in upstream.bodies[-4:]]
    assert salts == ["", salt_of(5, ""), salt_of(5, "t"), salt_of(5, "")]
    said = [Stored(plain), Cleared(), Stored(plain), Stored(tenant), Stored(plain)]
    await eventually(lambda: heard.events == [(0, event) for event in said])
    await rig.engine.stop()


async def test_the_size_of_a_block_comes_from_the_events(upstream: Upstream, publisher: Publisher) -> None:
    upstream.metrics = ""
    rig = await started(upstream, Heard(), kv_events=[publisher.endpoint], block_tokens=16)
    assert rig.engine.identity.profile.block_tokens == 32
    await rig.engine.stop()


async def test_without_events_it_serves_and_registers_that_it_announces_none(
    upstream: Upstream,
) -> None:
    silent, heard = Publisher(), Heard()
    times = AccountTimes(stored_s=0.2)
    rig = await started(upstream, heard, kv_events=[silent.endpoint], times=times)
    assert not rig.engine.announces
    assert rig.engine.identity.profile.block_tokens == 32  # by its metrics
    answer = await ask(rig, prompt())
    assert answer.error is None
    await rig.engine.stop()
    silent.close()


async def test_a_failed_subscription_is_repeated_until_the_worker_can_register_anew(
    upstream: Upstream, publisher: Publisher, eventually: Eventually
) -> None:
    stores, lost = upstream.stored, list[object]()
    upstream.stored = lambda prompt, salt: lost.append(prompt)  # it comes up before its events do
    heard, times = Heard(), AccountTimes(stored_s=0.2, events_again_s=0.05)
    rig = await started(upstream, heard, kv_events=[publisher.endpoint], times=times)
    try:
        assert not rig.engine.announces
        tried = len(lost)
        await until(lambda: len(lost) >= tried + 2)  # repeated in vain
        await rig.engine.check()
        upstream.stored = stores

        async def changed() -> bool:
            try:
                await rig.engine.check()
            except EngineChanged as error:
                return "kv_events" in str(error)
            return False

        await until(changed)
        assert not rig.engine.announces and not heard.events, "this instance has registered without events"
    finally:
        await rig.engine.stop()
    assert "upstream-kv-events" not in {thread.name for thread in threading.enumerate()}
    again = await started(upstream, Heard(), kv_events=[publisher.endpoint])
    assert again.engine.announces
    await again.engine.stop()


async def test_dp_ranks_are_distinguished(
    upstream: Upstream, publisher: Publisher, eventually: Eventually
) -> None:
    upstream.metrics = VLLM + VLLM.replace('engine="0"', 'engine="1"').replace(" 2.0", " 6.0")
    second, heard = Publisher(), Heard()
    rig = await started(upstream, heard, kv_events=[publisher.endpoint, second.endpoint])
    assert (rig.engine.identity.dp, rig.engine.identity.profile.kv_blocks) == (2, 800)
    assert rig.engine.ranks() == [Load(3, 2, 100, 400), Load(3, 6, 100, 400)]
    assert rig.engine.load() == Load(6, 8, 200, 800)
    second.publish(stored([5], range(32), 32))
    await eventually(lambda: [rank for rank, _ in heard.events] == [1])
    await ask(rig, prompt(), rank=1)
    assert upstream.ranks[-1] == "1"
    client = Client(upstream.url, "", 8)
    about = replace(await client.abilities(), ranks=2)
    request = Generate(0, "r", prompt(), 40, Sampling(max_tokens=1), rank=1)
    with pytest.raises(NoHandle):  # it has no connector, but the rank with the cache was asked
        await client.handle(about, request, 5.0)
    assert upstream.ranks[-1] == "1"
    await client.close()
    await rig.engine.stop()
    second.close()


async def test_the_load_follows_the_upstreams_metrics(upstream: Upstream, eventually: Eventually) -> None:
    rig = await started(upstream, Heard(), times=AccountTimes(every_s=0.01, stale_s=1.0))
    assert not rig.engine.announces
    assert rig.engine.load() == Load(3, 2, 100, 400)
    upstream.metrics = VLLM.replace(" 2.0", " 9.0")
    await eventually(lambda: rig.engine.load().waiting == 9)
    upstream.metrics = ""
    await eventually(lambda: rig.engine.load() == Load(0, 0, 0, 400))
    await rig.engine.stop()


async def test_metrics_that_are_too_long_or_too_slow_are_ignored(upstream: Upstream) -> None:
    client = Client(upstream.url, "", 1)
    assert await client.metrics(5.0) == VLLM
    upstream.metrics = "x" * (5 * 1024 * 1024)
    assert await client.metrics(5.0) is None
    assert await client.metrics(0.0) is None
    await client.close()


async def test_a_cancelled_start_leaves_nothing_running(upstream: Upstream, publisher: Publisher) -> None:
    upstream.stored = None  # so that it waits for events
    client = Client(upstream.url, "", 8)
    account = UpstreamAccount(client, lambda: 0, [publisher.endpoint])
    starting = asyncio.ensure_future(account.start(await client.abilities(), Heard()))
    await asyncio.to_thread(publisher.wait_for_listener)
    starting.cancel()
    await asyncio.wait((starting,))
    await account.stop()
    await client.close()
    assert not account.announces
    assert "upstream-kv-events" not in {thread.name for thread in threading.enumerate()}


async def test_kv_event_counts_are_a_metric(
    upstream: Upstream, publisher: Publisher, eventually: Eventually
) -> None:
    rig = await started(upstream, Heard(), kv_events=[publisher.endpoint])
    try:
        engine = rig.engine
        assert isinstance(engine, OpenAIEngine)
        publisher.publish(removed([1]))
        await eventually(lambda: engine.kv_event_counts["batches"] >= 1)
        assert not engine.kv_event_counts["malformed"]
    finally:
        await rig.engine.stop()
    assert {family.name for family in WorkerMetrics([]).collect()} >= {"holdfast_worker_upstream_kv_events"}


def test_canaries_have_a_known_salt_prefix() -> None:
    assert CANARY_SALT.endswith("-")


# --- settings

OPENAI = {"engine": "openai", "upstream": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    "endpoints", ["tcp://h-1.example:5557", "tcp://[::1]:1, tcp://10.0.0.1:65535", "ipc:///run/kv"]
)
def test_valid_settings_are_accepted(endpoints: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    flags = OPENAI | {
        "model": str(tmp_path),
        "upstream_kv_events": endpoints,
        "upstream_kv_replay": endpoints,
    }
    assert load_settings(flags, {}).upstream_kv_events == endpoints


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"upstream_kv_events": "tcp://h:5557"}, "only the openai engine"),
        (OPENAI | {"upstream_kv_events": "h:5557"}, "'h:5557' is not an endpoint"),
        (OPENAI | {"upstream_kv_events": "tcp://*:5557"}, "is not an endpoint"),
        (OPENAI | {"upstream_kv_events": "tcp://h:65536"}, "is not an endpoint"),
        (
            OPENAI | {"upstream_kv_events": "tcp://h:1", "upstream_kv_replay": "nonsense"},
            "is not an endpoint",
        ),
        (
            OPENAI | {"upstream_kv_events": "tcp://h:1,tcp://h:2", "upstream_kv_replay": "tcp://h:3"},
            "one for each",
        ),
        (OPENAI | {"upstream_kv_replay": "tcp://h:3"}, "one for each"),
    ],
)
def test_invalid_settings_are_refused(flags: dict[str, str], words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadSetting, match=words.replace("*", ".")):
        load_settings(flags | {"model": str(tmp_path)}, {})
