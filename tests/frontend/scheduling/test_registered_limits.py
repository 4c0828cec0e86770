"""Limits of a request come from the workers that may serve it.

One worker's registration never narrows what the others serve.
"""

from dataclasses import replace

import pytest
from filter_rules import rules
from frontend_kit import joined
from scripted_worker import ScriptedWorker

from controller.router.endpoints import Endpoint, EndpointGroup, EndpointTable, confirmed, most_common_value
from controller.router.selection.filter import Filter, NoneRoutable

LINEAGE = ("r1", "builtin:sim")


def table_of(*contexts: int, **named: object) -> EndpointTable:
    table = EndpointTable()
    table.set_static(
        replace(joined(ScriptedWorker(f"w{n}")), context_tokens=context, **named)  # type: ignore[arg-type]
        for n, context in enumerate(contexts)
    )
    return table


def group_of(table: EndpointTable) -> EndpointGroup:
    group = table.group("m", LINEAGE)
    assert group is not None
    return group


def test_a_worker_that_registers_a_context_of_one_token_narrows_no_limit() -> None:
    group = group_of(table_of(8192, 8192, 1))
    assert (group.context_tokens, group.usual_context) == (8192, 8192)
    assert group.answer_room(100) == 8092


def test_a_worker_that_registers_a_huge_context_changes_no_default() -> None:
    group = group_of(table_of(8192, 8192, 1 << 30))
    assert group.usual_context == 8192 and group.answer_room(100) == 8092


def test_limits_come_from_routable_workers_if_there_are_any() -> None:
    table = table_of(8192, 1, 1, 1)
    for name in ("w1", "w2", "w3"):
        table.endpoints[(name, "i1")].weight = 0.0
    assert group_of(table).context_tokens == group_of(table).usual_context == 8192


def test_a_registered_migration_limit_of_zero_does_not_affect_other_workers() -> None:
    table = EndpointTable()
    limits = (3, 3, 0)
    table.set_static(
        replace(joined(ScriptedWorker(f"w{n}")), migration_limit=limit) for n, limit in enumerate(limits)
    )
    assert table.migration_limit("m") == 3
    assert most_common_value([1, 2, 2, 1]) == 2


def test_a_request_goes_only_to_a_worker_with_a_large_enough_context() -> None:
    table = table_of(8192, 100)
    known = rules(cap=8)
    endpoints = group_of(table).endpoints
    names = [endpoint.worker for endpoint in Filter(endpoints, known, tokens=101).left()]
    assert names == ["w0"] and not Filter(endpoints, known, tokens=101).fits(endpoints[1])
    assert len(Filter(endpoints, known, tokens=100).left()) == 2
    with pytest.raises(NoneRoutable):
        Filter(endpoints, known, tokens=8193).left()


def test_an_impossible_registration_gets_no_request() -> None:
    nonsense = Endpoint(replace(joined(ScriptedWorker("w9")), context_tokens=-4))
    assert nonsense.context_tokens == 0


@pytest.mark.parametrize(
    ("claims", "shown"),
    [
        ([(4096, "a")], 4096),
        ([(4096, "a"), (1 << 30, "rogue")], 4096),
        ([(4096, "a"), (1 << 30, "rogue"), (1 << 30, "rogue")], 4096),
        ([(4096, "a"), (4096, "b"), (32_768, "c"), (65_536, "d")], 32_768),
        ([(4096, "a"), (8192, "a")], 8192),
    ],
)
def test_the_context_shown_to_clients_is_not_a_single_accounts_claim(
    claims: list[tuple[int, str]], shown: int
) -> None:
    assert confirmed(claims) == shown
