"""A quickly made frozen dataclass differs from an ordinary one only in the time of its construction."""

import copy
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields
from datetime import UTC, datetime

import msgspec
import pytest

from events.decisions import BreakerClosed
from events.frozen import fast_constructor, replace


@dataclass(frozen=True, slots=True)
class Slow:
    """An ordinary frozen dataclass."""

    seq: int
    name: str = "unnamed"
    seen: Mapping[str, int] = field(default_factory=dict)


@fast_constructor
@dataclass(frozen=True, slots=True)
class Quick:
    """The same, made quickly."""

    seq: int
    name: str = "unnamed"
    seen: Mapping[str, int] = field(default_factory=dict)


def test_it_holds_what_it_was_given_and_the_defaults_for_the_rest() -> None:
    for arguments, named in (
        ((1,), {}),
        ((1, "w0"), {}),
        ((1,), {"seen": {"a": 2}}),
        ((), {"seq": 3, "name": "x"}),
    ):
        slow, quick = Slow(*arguments, **named), Quick(*arguments, **named)
        assert [getattr(slow, f.name) for f in fields(slow)] == [
            getattr(quick, f.name) for f in fields(quick)
        ]
        assert type(quick) is Quick


def test_each_has_its_own_default() -> None:
    assert Quick(1).seen is not Quick(1).seen


def test_it_is_frozen() -> None:
    quick = Quick(1)
    with pytest.raises(FrozenInstanceError):
        quick.seq = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del quick.seq
    assert quick.seq == 1


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="seq"):
        Quick()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        Quick(1, colour="red")  # type: ignore[call-arg]


def test_it_can_be_compared_copied_replaced_shown_and_sent() -> None:
    quick = Quick(1, "w0", {"a": 1})
    assert quick == Quick(1, "w0", {"a": 1}) != Quick(2)
    assert replace(quick, name="w1") == Quick(1, "w1", {"a": 1})
    assert copy.deepcopy(quick) == pickle.loads(pickle.dumps(quick)) == quick
    assert repr(quick) == "Quick(seq=1, name='w0', seen={'a': 1})"
    assert msgspec.json.decode(msgspec.json.encode(quick), type=Quick) == quick


@dataclass(frozen=True, slots=True)
class Checked:
    """A value with a check in `__post_init__`."""

    share: float
    twice: float = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError("share")
        object.__setattr__(self, "twice", 2 * self.share)


@dataclass(frozen=True)
class Open:
    """Without slots."""

    seq: int = 0


@pytest.mark.parametrize("of", [Slow(1, "w0", {"a": 1}), Quick(1, "w0", {"a": 1})])
def test_a_copy_has_the_changes_and_shares_the_rest(of: Slow | Quick) -> None:
    made = replace(of, name="w1")
    assert (made.seq, made.name, type(made)) == (1, "w1", type(of))
    assert made.seen is of.seen
    assert of.name == "w0"
    with pytest.raises(FrozenInstanceError):
        made.name = "w2"  # type: ignore[misc]
    with pytest.raises(AttributeError, match="colour"):
        replace(of, colour="red")  # type: ignore[call-arg]


def test_a_copy_of_a_fact_has_the_fields_of_all_its_families() -> None:
    fact = BreakerClosed(worker="w0", instance="i1", decided_at=datetime(2026, 1, 1, tzinfo=UTC), cause="c")
    made = replace(fact, number=7)
    assert made == BreakerClosed(**{f.name: getattr(fact, f.name) for f in fields(fact)} | {"number": 7})
    assert fact.number == 0


def test_a_copy_is_checked_as_the_original_was() -> None:
    assert replace(Checked(0.2), share=0.4) == Checked(0.4)
    with pytest.raises(ValueError, match="share"):
        replace(Checked(0.2), share=2)
    assert replace(Open(1), seq=2) == Open(2)
