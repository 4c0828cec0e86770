"""The translation of an engine's block hashes: announced blocks are those that it has, never more."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_events import Shape, cleared, packed, removed, stored

from events import blocks
from events.kv import Cleared, KvEvent, Removed, Stored, Tier
from workers.engines.openai.kv_names import (
    CANARY_SALT,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    MalformedKvBatch,
    Names,
    read_batch,
    read_salt,
    salt_of,
)

TOKENS = list(range(1, 13))  # three blocks of four


def names_of(tokens: Sequence[int], size: int = 4, seed: int = blocks.SEED) -> list[int]:
    return blocks.sequence_hashes(blocks.local_hashes(tokens, size, seed))


def heard(names: Names, *events: Any) -> list[KvEvent]:
    return names.take(read_batch(packed(events)).events)


# --- the format


@pytest.mark.parametrize("shape", ["map", "array"])
def test_both_shapes_of_an_event_are_read(shape: Shape) -> None:
    batch = read_batch(
        packed([stored([7, 8], TOKENS[:8], 4, shape=shape), removed([7], shape=shape), cleared(shape)], 5.5)
    )
    assert (batch.at, batch.unknown) == (5.5, 0)
    first, second, third = batch.events
    assert isinstance(first, BlocksStored) and list(first.tokens) == TOKENS[:8]
    assert (first.keys, first.parent, first.block_tokens, first.tier) == ([7, 8], None, 4, Tier.DEVICE)
    assert second == BlocksRemoved([7]) and third == AllCleared()


def test_an_early_vllm_with_fewer_fields_is_read() -> None:
    batch = read_batch(
        msgspec.msgpack.encode([1.0, [["BlockStored", [-7], None, [1, 2], 2, None], ["BlockRemoved", [-7]]]])
    )
    assert [type(event) for event in batch.events] == [BlocksStored, BlocksRemoved]


def test_a_later_engine_with_more_fields_is_read() -> None:
    more = stored(
        [b"\x01" * 32], TOKENS[:4], 4, group_idx=0, kv_cache_spec_kind="full_attention", mood="good"
    )
    longer = ["BlockRemoved", [1], "GPU", 0, None, None, "more", {"and": "more"}]
    batch = read_batch(
        msgspec.msgpack.encode({"ts": 1, "events": [more, longer, ["BlockPinned", [1]]], "x": 1})
    )
    assert [type(event) for event in batch.events] == [BlocksStored, BlocksRemoved]
    assert batch.unknown == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["soon", []]),
        msgspec.msgpack.encode([float("nan"), []]),
        b"\x91" * 10_000,
        msgspec.msgpack.encode([1.0, 7]),
        packed([7]),
        packed([[]]),
        packed([[7, 8]]),
        packed([{"block_hashes": [1]}]),
        packed([stored([None], TOKENS[:4], 4)]),
        packed([stored([1.5], TOKENS[:4], 4)]),
        packed([stored([1], [1, 2, -3, 4], 4)]),
        packed([stored([1], [1, 2, 3, 2**40], 4)]),
        packed([stored([1], ["a", "b"], 4)]),
        packed([stored([1], TOKENS[:4], 4, block_size=None)]),
        packed([stored([1], TOKENS[:4], 0)]),
        packed([stored([1], TOKENS[:4], -4)]),
        packed([stored([1], TOKENS[:4], 4, extra_keys=7)]),
        packed([["BlockStored", [1], None]]),
        packed([["BlockRemoved", 5]]),
        packed([["BlockRemoved"]]),
    ],
)
def test_an_unreadable_batch_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedKvBatch):
        read_batch(payload)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(payload=st.binary(max_size=60), value=st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.sampled_from(["BlockStored", "BlockRemoved"]),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
))  # fmt: skip
def test_any_payload_is_read_or_malformed(payload: bytes, value: Any) -> None:
    for one in (payload, msgspec.msgpack.encode([1.0, [value]])):
        try:
            Names().take(read_batch(one).events)
        except MalformedKvBatch:
            continue


# --- the names


def test_blocks_have_the_names_used_everywhere() -> None:
    names, (a, b, c) = Names(), names_of(TOKENS)
    assert heard(names, stored([-1, -2], TOKENS[:8], 4)) == [Stored([a, b])]
    assert heard(names, stored([-3], TOKENS[8:], 4, parent=-2)) == [Stored([c], b)]
    assert heard(names, removed([-3]), removed([-2])) == [Removed([c, b])]
    assert names.block_tokens == 4


def test_a_whole_digest_is_a_name_too() -> None:
    names, (a, b, _) = Names(), names_of(TOKENS)
    first, second = b"\x01" * 32, b"\x02" * 32
    assert heard(names, stored([first], TOKENS[:4], 4)) == [Stored([a])]
    assert heard(names, stored([second], TOKENS[4:8], 4, parent=first)) == [Stored([b], a)]


def test_a_second_copy_keeps_a_block_there() -> None:
    names, (a, *_) = Names(), names_of(TOKENS)
    heard(names, stored([1], TOKENS[:4], 4), stored([1], TOKENS[:4], 4))
    assert heard(names, removed([1])) == []
    assert heard(names, removed([1])) == [Removed([a])]
    assert heard(names, removed([1])) == []


def test_tiers_follow_the_medium_and_a_block_lives_as_long_as_any_of_them_has_it() -> None:
    names, (a, b, _) = Names(), names_of(TOKENS)
    heard(names, stored([1, 2], TOKENS[:8], 4))
    assert heard(names, stored([1], TOKENS[:4], 4, medium="cpu")) == [Stored([a], None, Tier.HOST)]
    assert heard(names, stored([2], [], 0, medium="STORAGE")) == [
        Stored([b], a, Tier.DISK)
    ]  # where, not what
    assert heard(names, removed([2, 1])) == [Removed([b, a])]
    assert heard(names, removed([1], "CPU")) == [Removed([a], Tier.HOST)]
    assert heard(names, removed([2], "STORAGE")) == [Removed([b], Tier.DISK)]
    assert len(names) == 0


@pytest.mark.parametrize(
    "elsewhere", [{"medium": "EXTERNAL"}, {"locality": "REMOTE"}, {"kv_cache_spec_kind": "sliding_window"}]
)
def test_blocks_outside_this_engines_prefix_cache_are_ignored(elsewhere: dict[str, Any]) -> None:
    names = Names()
    assert heard(names, stored([1], TOKENS[:4], 4, **elsewhere)) == []
    assert names.block_tokens is None


def test_only_one_of_several_layer_groups_is_used() -> None:
    names, (a, *_) = Names(), names_of(TOKENS)
    both = [stored([1], TOKENS[:4], 4, group_idx=group) for group in (0, 1)]
    assert heard(names, *both) == [Stored([a])]
    assert heard(names, removed([1], group_idx=1)) == []
    assert heard(names, removed([1], group_idx=0)) == [Removed([a])]


def test_salts_and_adapters_are_in_the_names() -> None:
    names = Names()
    salted = names_of(TOKENS, seed=blocks.seed(lora="law", namespace="tenant"))
    extras = [["law", "tenant"], ["law"], ["law"]]
    said = heard(names, stored([1, 2, 3], TOKENS, 4, lora_id=3, lora_name="law", extra_keys=extras))
    assert said == [Stored(salted)]
    more = [13, 14, 15, 16]
    fourth = names_of(TOKENS + more, seed=blocks.seed(lora="law", namespace="tenant"))[3]
    said = heard(names, stored([4], more, 4, parent=3, lora_id=3, lora_name="law", extra_keys=[["law"]]))
    assert said == [Stored([fourth], salted[2])]


def test_an_unreported_salt_hides_possibly_salted_prompts_until_salts_are_reported() -> None:
    names, (a, *_) = Names(), names_of(TOKENS)
    other = list(range(50, 58))
    names.salted(TOKENS)  # the size of a block is not known yet
    assert heard(names, stored([1], TOKENS[:4], 4)) == [Stored([a])]
    assert heard(names, removed([1])) == [Removed([a])]
    names.salted(TOKENS)
    names.salted(TOKENS[:3])
    assert heard(names, stored([2], TOKENS[:4], 4), stored([3], TOKENS[4:8], 4, parent=2)) == []
    assert heard(names, stored([5, 6], other, 4)) == [Stored(names_of(other))]
    seed = blocks.seed(namespace="tenant")
    salted = stored([7], TOKENS[:4], 4, extra_keys=[["tenant"]])
    assert heard(names, salted) == [Stored(names_of(TOKENS[:4], seed=seed))]
    assert heard(names, stored([8], TOKENS[:4], 4)) == [Stored([a])]


def test_an_unreported_salt_hides_only_prompts_with_the_same_adapter() -> None:
    names = Names()
    heard(names, stored([1], TOKENS[:4], 4))
    names.salted(TOKENS, "law")
    assert heard(names, stored([2], TOKENS[:4], 4, lora_id=3, lora_name="law")) == []
    of_sql = Stored(names_of(TOKENS[:4], seed=blocks.seed(lora="sql")))
    assert heard(names, stored([3], TOKENS[:4], 4, lora_id=4, lora_name="sql")) == [of_sql]


def test_only_the_last_salted_prompts_are_remembered() -> None:
    names = Names(salted_max=2)
    heard(names, stored([1], TOKENS[:4], 4))
    for first in (10, 20, 30):
        names.salted([first] * 4)
    said = heard(names, *[stored([first], [first] * 4, 4) for first in (10, 20, 30)])
    assert said == [Stored(names_of([10] * 4))]


@pytest.mark.parametrize(
    "hidden",
    [
        {"extra_keys": [[CANARY_SALT + "2f"], None]},
        {"extra_keys": [[["picture", 0]], None]},
        {"extra_keys": [["salt", b"embedded"], None]},
        {"lora_id": 3},
    ],
)
def test_blocks_that_no_router_can_ask_for_are_not_announced(hidden: dict[str, Any]) -> None:
    names = Names()
    assert heard(names, stored([1, 2], TOKENS[:8], 4, **hidden)) == []
    assert heard(names, stored([3], TOKENS[8:], 4, parent=2)) == []
    assert heard(names, removed([3, 2, 1])) == []
    assert (len(names), sum(names.passed_over.values())) == (0, 0)


def test_an_image_hides_only_the_blocks_after_it() -> None:
    names, (a, *_) = Names(), names_of(TOKENS)
    extras = [None, [["picture", 1]], None]
    assert heard(names, stored([1, 2, 3], TOKENS, 4, extra_keys=extras)) == [Stored([a])]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([9], TOKENS[:4], 4, parent=8), "orphan"),
        (stored([9], TOKENS[:2], 2), "odd_size"),
        (stored([8, 9], TOKENS[:4], 4), "odd_size"),
        (stored([9], [], 0), "unnamed"),
    ],
)
def test_blocks_that_cannot_be_named_are_counted(event: Any, reason: str) -> None:
    names = Names()
    heard(names, stored([1], TOKENS[:4], 4))
    assert heard(names, event) == []
    assert names.passed_over[reason] > 0
    assert len(names) == 1


def test_an_emptied_cache_is_forgotten() -> None:
    names = Names()
    heard(names, stored([1], TOKENS[:4], 4))
    assert heard(names, cleared()) == [Cleared()]
    assert heard(names, stored([2], TOKENS[4:8], 4, parent=1)) == []
    assert names.passed_over["orphan"] == 1


# --- after a loss


def test_blocks_in_use_are_recovered_after_a_loss() -> None:
    names, (a, b, c) = Names(), names_of(TOKENS)
    heard(names, stored([1, 2], TOKENS[:8], 4))
    assert names.lose() == [Cleared()]
    assert heard(names, removed([9])) == []
    assert heard(names, stored([3], TOKENS[8:], 4, parent=2)) == [Stored([a, b]), Stored([c], b)]


def test_a_block_stored_on_a_slower_tier_does_not_prove_its_parents() -> None:
    names = Names()
    heard(names, stored([1], TOKENS[:4], 4))
    names.lose()
    assert heard(names, stored([2], TOKENS[4:8], 4, parent=1, medium="CPU")) == []
    assert names.passed_over["orphan"] == 1


def test_known_blocks_are_bounded_and_lost_ones_make_room_first() -> None:
    names = Names(known_max=2)
    heard(names, stored([1, 2], TOKENS[:8], 4))
    assert heard(names, stored([3], TOKENS[8:], 4)) == []
    assert names.passed_over["full"] == 1
    names.lose()
    assert heard(names, stored([3], TOKENS[8:], 4)) == [Stored(names_of(TOKENS[8:]))]
    assert len(names) == 1


class Engine:
    """A prefix cache like vLLM's: every copy of a block is reported when it is stored and removed. A path names a block."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[int, ...]] = Counter()
        self.keys: dict[tuple[int, ...], int] = {}

    def has(self, path: tuple[int, ...]) -> bool:
        return self.copies[path] > 0

    def store(self, path: tuple[int, ...], again: int) -> Any:
        """Compute a prompt, and its last `again` cached blocks once more."""
        cached = 0
        while cached < len(path) and self.has(path[: cached + 1]):
            cached += 1
        first = max(0, min(cached, len(path) - 1) - again)
        made = [path[: n + 1] for n in range(first, len(path))]
        for one in made:
            self.copies[one] += 1
            self.keys.setdefault(one, len(self.keys) + 100)
        tokens = [token for block in path[first:] for token in (block, block + 10)]
        parent = self.keys[path[:first]] if first else None
        return stored([self.keys[one] for one in made], tokens, 2, parent=parent)

    def evict(self, place: int) -> Any:
        there = sorted(path for path, copies in self.copies.items() if copies)
        if not there:
            return removed([])
        path = there[place % len(there)]
        self.copies[path] -= 1
        return removed([self.keys[path]])

    def named(self) -> set[int]:
        return {
            names_of([t for block in path for t in (block, block + 10)], 2)[-1]
            for path, copies in self.copies.items()
            if copies
        }


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=4).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("store"), PROMPTS, st.integers(0, 2)),
    st.tuples(st.just("evict"), st.integers(0, 20), st.none()),
)


def apply(events: list[KvEvent], has: set[int]) -> None:
    for event in events:
        match event:
            case Stored(blocks=names, parent=parent):
                assert parent is None or parent in has, "an index stores no block without its parent"
                has.update(names)
            case Removed(blocks=names):
                assert has.issuperset(names)
                has.difference_update(names)
            case Cleared():
                has.clear()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(STEPS, st.sampled_from(["heard"] * 5 + ["lost"])), max_size=30),
    losses=st.booleans(),
)
def test_announced_blocks_match_the_engine_and_are_never_more_after_losses(
    steps: list[Any], losses: bool
) -> None:
    engine, names = Engine(), Names()
    has: set[int] = set()
    for (kind, what, again), fate in steps:
        event = engine.store(what, again) if kind == "store" else engine.evict(what)
        if losses and fate == "lost":
            apply(names.lose(), has)
            continue
        apply(heard(names, event), has)
        assert has <= engine.named() if losses else has == engine.named()


def test_after_a_conviction_only_newer_blocks_are_known_by_their_own_salts() -> None:
    names, plain, tenant = Names(), names_of(TOKENS), names_of(TOKENS, seed=blocks.seed(namespace="t"))

    def salted(key: int, epoch: int, own: str = "", parent: int | None = None) -> Any:
        extras = [[salt_of(epoch, own)], None, None] if parent is None else None
        return stored([key, key + 1, key + 2], TOKENS, 4, parent, extra_keys=extras)

    assert heard(names, stored([1], TOKENS[:4], 4)) == [Stored(plain[:1])]
    assert heard(names, salted(10, 7)) == [Cleared(), Stored(plain)]
    assert heard(names, salted(20, 7, "t")) == [Stored(tenant)]
    old = stored([2], TOKENS[4:8], 4, parent=1), stored([3], TOKENS[:4], 4), salted(30, 6), salted(40, 0)
    assert heard(names, *old, removed([1, 2, 3, 30]), removed([12])) == [Removed(plain[2:])]
    assert heard(names, salted(50, 9)) == [Cleared(), Stored(plain)]
    assert heard(names, removed([10, 20])) == []


@given(epoch=st.integers(0, 10**16), salt=st.text(max_size=4), looks=st.booleans())
@settings(max_examples=30, deadline=None)
def test_any_salt_is_read_as_it_was_written(epoch: int, salt: str, looks: bool) -> None:
    salt = salt_of(9, salt) if looks else salt
    assert read_salt(salt_of(epoch, salt)) == (epoch, salt)


def test_salts_that_resemble_an_epochs_are_not_one() -> None:
    for salt in (
        "",
        "holdfast-epoch-",
        "holdfast-epoch-7",
        "holdfast-epoch-x-a",
        f"holdfast-epoch-{'9' * 99}-a",
    ):
        assert read_salt(salt) == (0, salt)
