"""A worker's KV claims are bounded by what it registered, and lost when requests do not find them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from frontend_kit import joined
from scripted_worker import ScriptedWorker

from controller.router.endpoints import Key, WorkerRank
from controller.router.index.view import JUDGED, SLACK_BLOCKS, WRONG, KvView
from events.kv import KvBatch, KvEvent, Stored
from events.observations import WorkerJoined

LIAR = WorkerRank("w0", "i1", 0)


def registered(name: str, kv_blocks: int = 100) -> WorkerJoined:
    made = joined(ScriptedWorker(name))
    return replace(made, kv_events=True, profile=replace(made.profile, kv_blocks=kv_blocks))


@pytest.fixture
def view() -> Iterator[tuple[KvView, list[tuple[Key, str]]]]:
    made, lost = KvView(lambda: 0.0), list[tuple[Key, str]]()
    made.claims.lost = lambda key, why: lost.append((key, why))
    made.absorb([registered("w0"), registered("w1")], 0.0)
    yield made, lost


def claim(view: KvView, holder: WorkerRank, first: int, blocks: Sequence[int], event: int) -> None:
    stored: list[KvEvent] = [Stored(blocks=list(blocks), parent=None)]
    view.take(KvBatch(holder.worker, holder.instance, holder.rank, event, stored), 0.0)


def test_a_worker_that_claims_more_blocks_than_it_registered_loses_its_claims(
    view: tuple[KvView, list[tuple[Key, str]]],
) -> None:
    made, lost = view
    honest = WorkerRank("w1", "i1", 0)
    claim(made, honest, 0, range(1, 90), 0)
    claim(made, LIAR, 0, range(10_000, 10_090), 0)
    assert not lost
    claim(made, LIAR, 0, range(20_000, 20_000 + 100 + SLACK_BLOCKS), 1)
    ((key, why),) = lost
    assert key == ("w0", "i1") and "claim" in why
    assert made.index.count(LIAR) == 0 and made.index.count(honest) == 89
    claim(made, LIAR, 0, [7777], 2)
    assert made.index.count(LIAR) == 0, "no further claims of this life are accepted"
    made.absorb([registered("w0"), registered("w1"), registered("w2")], 1.0)
    claim(made, LIAR, 0, [7777], 0)
    assert made.index.count(LIAR) == 0
    made.absorb([replace(registered("w0"), instance="i2"), registered("w1")], 2.0)
    claim(made, WorkerRank("w0", "i2", 0), 0, [7777], 0)
    assert made.index.count(WorkerRank("w0", "i2", 0)) == 1, "claims of its next life are accepted"


def test_a_worker_loses_claims_that_no_request_finds(
    view: tuple[KvView, list[tuple[Key, str]]],
) -> None:
    made, lost = view
    claim(made, LIAR, 0, range(1, 50), 0)
    for _ in range(WRONG - 1):
        made.compare(LIAR, 640, 0)
    assert not lost
    made.compare(LIAR, 640, 16)
    assert len(lost) == 1 and made.index.count(LIAR) == 0


def test_an_honest_worker_keeps_its_claims_when_blocks_are_evicted(
    view: tuple[KvView, list[tuple[Key, str]]],
) -> None:
    made, lost = view
    for n in range(10 * JUDGED):
        made.compare(LIAR, 640, 0 if n % 3 else 640)  # two of three are stale
    made.compare(LIAR, 16, 0)  # too small a claim to attract a request
    assert not lost
