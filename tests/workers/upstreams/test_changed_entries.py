"""What a changed entry of the file of upstreams means for its worker."""

from typing import Any

import pytest
from msgspec.structs import replace

from workers.config.upstream_route import UpstreamTls
from workers.config.upstreams import ADJUSTABLE, UpstreamEntry, UpstreamLimits
from workers.upstreams.changes import changes, needs_rejoin

A = UpstreamEntry(name="a", url="http://a")
OTHERS: dict[str, Any] = {
    "url": "http://b",
    "model": "/m",
    "revision": "r2",
    "key_file": "/k",
    "tls": UpstreamTls(ca_file="/ca"),
    "headers": {"X": "1"},
    "proxy": "http://p",
    "weight": 0.5,
    "zone": "z",
    "limits": UpstreamLimits(requests_max=8),
    "kv_events": ["tcp://a:1"],
    "kv_replay": ["tcp://a:2"],
    "discover": "dns",
}


def test_every_field_but_the_name_and_the_pause_is_covered() -> None:
    assert {*OTHERS, "name", "pause"} == {*UpstreamEntry.__struct_fields__}


@pytest.mark.parametrize("name", OTHERS)
def test_only_some_fields_change_while_the_worker_runs(name: str) -> None:
    (change,) = changes([A], [replace(A, **{name: OTHERS[name]})])
    assert change.action == ("adjust" if name in ADJUSTABLE else "rejoin")
    assert change.fields == (name,)


def test_entries_come_and_go() -> None:
    b, paused = replace(A, name="b", url="http://b"), replace(A, pause=True)
    assert [str(one) for one in changes([A], [b])] == [
        "a: removed; it drains and leaves",
        "b: added; it joins after its probes",
    ]
    assert [str(one) for one in changes([A], [paused])] == ["a: paused; it drains and leaves"]
    assert [str(one) for one in changes([paused], [A])] == ["a: resumed; it joins after its probes"]
    assert changes([A, b], [b, A]) == []


def test_a_paused_upstream_needs_no_rejoin() -> None:
    before, after = (replace(A, pause=True, url=url) for url in ("http://a", "http://b"))
    assert [one.action for one in changes([before], [after])] == ["adjust"]


@pytest.mark.parametrize(("before", "after", "expected"), [(64, 8, False), (8, 64, True), (8, 8, False)])
def test_only_a_higher_limit_needs_a_new_registration(before: int, after: int, expected: bool) -> None:
    one, other = (replace(A, limits=UpstreamLimits(requests_max=limit)) for limit in (before, after))
    assert needs_rejoin(one, other) is expected
    assert needs_rejoin(one, replace(one, limits=UpstreamLimits(requests_max=before, waiting_max=1)))
