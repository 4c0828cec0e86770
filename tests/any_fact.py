"""Random facts of any kind, for property tests: arbitrary fields, few names so that they interact."""

from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from typing import Any

from hypothesis import strategies as st

from events.codec import INT_MAX, KINDS
from events.fact import Fact

INSTANTS = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
WORKERS = st.sampled_from(["w0", "w1", "w2"])
SMALL = st.integers(0, 20)

MEETING = {
    "worker": WORKERS,
    "proposed_by": WORKERS,
    "source": WORKERS,
    "target": WORKERS,
    "instance": st.sampled_from(["i1", "i2"]),
    "canary": st.sampled_from(["c1", "c2"]),
    "canary_key": st.just("k"),
    "model": st.sampled_from(["llama", "qwen"]),
    "subject": st.sampled_from(["worker:w0", "model:llama", "", "nonsense"]),
    "incident": st.sampled_from(["", "incident-1", "incident-2"]),
    "number": SMALL,
    "routed_under": SMALL,
    "sent_under": SMALL,
    "failures_in_a_row": SMALL,
    "by": None,  # a name or a tuple of names, depending on the type
    "policy": st.dictionaries(st.text(max_size=5), JSON, max_size=3),
}


def facts_of(kind: type[Fact]) -> st.SearchStrategy[Fact]:
    """Return facts of one kind, with optional fields sometimes left out."""
    return _facts_of(kind.kind())


@cache
def _facts_of(name: str) -> st.SearchStrategy[Fact]:
    kind = KINDS[name]
    st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
    st.register_type_strategy(datetime, INSTANTS)
    st.register_type_strategy(int, st.integers(0, INT_MAX))
    chosen: dict[str, Any] = {
        f.name: MEETING[f.name] for f in fields(kind) if MEETING.get(f.name) is not None
    }
    return st.builds(kind, **chosen)


def facts() -> st.SearchStrategy[Fact]:
    """Return facts of all kinds."""
    return st.one_of([facts_of(kind) for kind in KINDS.values()])
