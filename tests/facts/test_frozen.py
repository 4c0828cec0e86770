"""A quickly made frozen dataclass is a frozen dataclass in everything but the time that it takes."""

import copy
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import msgspec
import pytest

from events.frozen import quickly_made


@dataclass(frozen=True, slots=True)
class Slow:
    """As the language makes it."""

    seq: int
    name: str = "nobody"
    seen: Mapping[str, int] = field(default_factory=dict)


@quickly_made
@dataclass(frozen=True, slots=True)
class Quick:
    """The same, made quickly."""

    seq: int
    name: str = "nobody"
    seen: Mapping[str, int] = field(default_factory=dict)


def test_it_holds_what_it_was_given_and_the_defaults_for_the_rest() -> None:
    for arguments, named in (
        ((1,), {}),
        ((1, "w0"), {}),
        ((1,), {"seen": {"a": 2}}),
        ((), {"seq": 3, "name": "x"}),
    ):
        slow, quick = Slow(*arguments, **named), Quick(*arguments, **named)  # type: ignore[arg-type]
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
