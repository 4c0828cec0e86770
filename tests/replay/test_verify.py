"""verify: it reports no difference for a true history, and finds planted differences."""

import json
from dataclasses import replace
from typing import Any

import pytest
from fleet_history import History
from memory_store import MemoryStore
from store_databases import AnyStore, OpenStore, execute, tamper
from test_replay_commands import journal, seq_of, typed

from controller.deciders.fleet import OLDEST
from controller.replay.travel import NotYet
from controller.replay.verify import verify
from controller.runtime.projection.projector import Projector
from events import codec
from events.decisions import HealthChanged, PolicyAdopted
from events.observations import EngineFaulted


async def projected(history: History, store: AnyStore, until: int | None = None) -> AnyStore:
    for seq in range(3, until or len(history.events), 3):
        await Projector(journal(history), store).catch_up(seq)
    await Projector(journal(history), store).catch_up(until or len(history.events))
    return store


def busy() -> History:
    """A history in which appends lose races against observations."""
    history = History().start(4)
    for n in range(12):
        history.say(history.failed("w1", reason="timeout"), history.passed("w0"), history.passed("w2"))
        history.decide(lag=n % 3, seconds=n * 3)
    history.corruption("w3")
    history.say(history.passed("w0"))
    history.absorb()
    return history


async def test_a_true_history_has_no_difference(open_store: OpenStore) -> None:
    history = busy()
    store = await projected(history, open_store(snapshot_every=5))
    report = await verify(journal(history), store)
    assert report.difference is None, report.lines()
    assert report.folded == report.audited == len(history.events) == report.position
    assert report.decided == history.order().position.number
    assert report.rows > 8 and report.lag == 0 and report.skipped == 0


async def test_from_a_snapshot_and_with_a_lag(open_store: OpenStore) -> None:
    history = busy()
    store = await projected(history, open_store(snapshot_every=5), until=len(history.events) - 4)
    report = await verify(journal(history), store, since=len(history.events) - 10)
    assert report.difference is None, report.lines()
    assert report.since > 0 and report.folded < len(history.events) and report.lag == 4
    code, said = await typed(history, store, "verify", "--since", str(len(history.events) - 10))
    assert code == 0 and "the projector is 4 events behind" in said


async def test_an_empty_store_and_an_empty_journal_are_equal(open_store: OpenStore) -> None:
    report = await verify(journal(History()), open_store())
    assert report.difference is None and report.folded == 0


async def test_repetitions_on_the_stream_are_no_difference(open_store: OpenStore) -> None:
    history = busy()
    history.repeat(history.events[-3])
    history.repeat(next(e for e in reversed(history.events) if e.fact.kind() == "request_migrated"))
    report = await verify(journal(history), await projected(history, open_store()))
    assert report.difference is None, report.lines()


async def test_a_fact_that_names_another_workers_source_is_counted_and_reported(
    open_store: OpenStore,
) -> None:
    """It is not a difference, and does not use up a number of that worker: its own fact with the same number is folded."""
    history = busy()
    source = "worker:w2:life"
    for worker in ("w0", "w2"):
        history.numbers[source] = 0
        history.say(
            EngineFaulted(worker=worker, instance=f"{worker}-a", reason="x", fatal=False), source=source
        )
    assert [event.source for event in [*history.order().pending][-2:]] == ["", source]
    store = await projected(history, open_store())
    code, said = await typed(history, store, "verify")
    assert code == 0 and said[-1] == "no difference"
    assert "1 facts claim a foreign source: forged, and counted for no source" in said
    code, (machine,) = await typed(history, store, "verify", "-o", "json")
    assert code == 0 and json.loads(machine)["forged"] == 1


async def plant(store: AnyStore, url: str, table: str, column: str, value: Any, where: str) -> None:
    """Change one row without a fact on the journal."""
    if isinstance(store, MemoryStore):
        from controller.read_model import rows as projection

        rows, n = store.tables.rows[table], projection.COLUMNS[table].index(column)
        (key,) = [key for key in rows if key[0] == where]
        rows[key] = (*rows[key][:n], value, *rows[key][n + 1 :])
    else:
        name = "id" if table == "migrations" else "worker"
        await execute(url, f'UPDATE holdfast.{table} SET "{column}" = $1 WHERE {name} = $2', value, where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [("workers", "weight", 0.123), ("workers", "health", "DEAD"), ("breakers", "position", "open"),
     ("migrations", "tokens", 999)],
)  # fmt: skip
async def test_a_planted_difference_in_a_row_is_found(
    open_store: OpenStore, database_url: str, table: str, column: str, value: Any
) -> None:
    history = busy()
    store = await projected(history, open_store())
    where = (
        "w0"
        if table != "migrations"
        else next(e.id for e in history.events if e.fact.kind() == "request_migrated")
    )
    await plant(store, database_url, table, column, value, where)
    code, said = await typed(history, store, "verify")
    assert code == 3
    assert (
        f"{table}: {column} of {where} differs at {len(history.events)}:" in said[-2]
        and str(value) in said[-2]
    )
    assert "holdfast replay rebuild" in said[-1]
    code, (machine,) = await typed(history, store, "verify", "-o", "json")
    assert code == 3 and json.loads(machine)["difference"]["found"] == value


async def test_a_row_too_many_is_found(database_url: str, open_store: OpenStore) -> None:
    history = busy()
    store = await projected(history, open_store())
    if isinstance(store, MemoryStore):
        rows = store.tables.rows["breakers"]
        rows["w9",] = ("w9", *rows["w0",][1:])
    else:
        await execute(
            database_url, "INSERT INTO holdfast.breakers SELECT 'w9', instance, position, position_value, failures, "
            "trials_failed, retry_at, deadline FROM holdfast.breakers WHERE worker = 'w0'",
        )  # fmt: skip
    report = await verify(journal(history), store)
    assert report.difference is not None and report.difference.where == "breakers: row w9"


@pytest.mark.servers
async def test_a_planted_change_of_a_kept_event_is_found(tester_url: str, open_store: OpenStore) -> None:
    history = busy()
    store = await projected(history, open_store())
    if isinstance(store, MemoryStore):
        row = store.tables.events[history.events[6].id]
        store.tables.events[history.events[6].id] = (*row[:-1], row[-1].replace("w", "x"))
    else:
        await tamper(
            tester_url, 'UPDATE holdfast.fleet_events SET body = body || \'{"worker": "x1"}\' WHERE seq = 7'
        )
    report = await verify(journal(history), store)
    assert report.difference is not None
    assert report.difference.where.startswith("fleet_events: body.")
    assert report.difference.seq == 7


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize(
    ("kept", "differs"),
    [({}, ""), ({"profile": None}, "body.profile"), ({"new": 1}, "body."), ({"pid": 1}, "body.pid")],
)
async def test_an_event_stored_by_an_older_version_may_lack_later_optional_fields(
    tester_url: str, open_store: OpenStore, kept: dict[str, Any], differs: str
) -> None:
    history = busy()
    store = await projected(history, open_store())
    joined = next(e for e in history.events if e.fact.kind() == "worker_joined")
    body = codec.to_builtins(joined.fact)
    del body["exact"]  # an optional field, at its default
    body |= kept
    if isinstance(store, MemoryStore):
        store.tables.events[joined.id] = (*store.tables.events[joined.id][:-1], json.dumps(body))
    else:
        await tamper(
            tester_url,
            "UPDATE holdfast.fleet_events SET body = $1 WHERE seq = $2",
            json.dumps(body),
            joined.seq,
        )
    report = await verify(journal(history), store)
    where = report.difference.where if report.difference else ""
    assert where.startswith(f"fleet_events: {differs}") if differs else not where, report.lines()


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize(
    ("lacks", "kept", "differs"),
    [
        (["exact", "topology"], {}, False),  # optional, and at their defaults
        ([], {"topology": {"host": ""}}, False),  # so is what it lacks further inside
        (["context_tokens"], {}, True),  # optional, but not at its default
        (["profile"], {}, True),
        (["exact"], {"pid": 1}, True),
        (["exact"], {"new": 1}, True),
    ],
)
async def test_a_row_of_an_older_version_may_lack_later_optional_fields(
    database_url: str, open_store: OpenStore, lacks: list[str], kept: dict[str, Any], differs: bool
) -> None:
    history = History()
    history.say(replace(history.joined("w0"), context_tokens=512))
    store = await projected(history, open_store())
    row = codec.to_builtins(history.events[0].fact) | kept
    value = json.dumps({name: item for name, item in row.items() if name not in lacks})
    await plant(store, database_url, "workers", "joined", value, "w0")
    report = await verify(journal(history), store)
    assert (report.difference.where if report.difference else "") == (
        "workers: joined of w0" if differs else ""
    )


async def test_verify_since_a_place_beyond_the_end_is_refused(open_store: OpenStore) -> None:
    history = busy()
    store = await projected(history, open_store())
    with pytest.raises(NotYet, match=f"the journal ends at {len(history.events)}, before 99999"):
        await typed(history, store, "verify", "--since", "99999")


async def test_a_planted_wrong_decision_is_found(open_store: OpenStore) -> None:
    history = busy()
    seq = seq_of(history, "health_changed", 5)
    event = history.events[seq - 1]
    assert isinstance(event.fact, HealthChanged)
    history.events[seq - 1] = replace(event, fact=replace(event.fact, weight=0.75))
    store = await projected(history, open_store())
    code, said = await typed(history, store, "verify")
    assert code == 3
    assert f"decision:{event.fact.number} differs at {seq}" in said[-1] and "0.75" in said[-1]


async def test_a_decision_too_few_is_found(open_store: OpenStore) -> None:
    history = History().start()
    history.say(history.failed("w0", confirmed=True, reason="token_mismatch"))
    decided = history.decide()
    dropped = len(history.events) - len(decided)
    history.stream.events[dropped:] = history.events[dropped:-1]
    report = await verify(journal(history), await projected(history, open_store()))
    assert report.difference is not None and report.difference.found is None


async def test_decisions_of_other_deciders_versions_are_not_decided_again(open_store: OpenStore) -> None:
    history = busy()
    first = seq_of(history, "policy_adopted")
    event = history.events[first - 1]
    assert isinstance(event.fact, PolicyAdopted)
    older = replace(event.fact, deciders_version=OLDEST - 1)
    history.events[first - 1] = replace(event, fact=older)
    wrong = seq_of(history, "health_changed", 5)
    event = history.events[wrong - 1]
    assert isinstance(event.fact, HealthChanged)
    history.events[wrong - 1] = replace(event, fact=replace(event.fact, weight=0.75))
    store = await projected(history, open_store())
    report = await verify(journal(history), store)
    assert report.difference is None, report.lines()
    assert report.skipped_versions == {OLDEST - 1} and report.decided == 0
    _, said = await typed(history, store, "verify")
    assert any("did not decide" in line for line in said)
