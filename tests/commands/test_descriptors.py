"""A process of a large fleet raises its file descriptor limit as far as the system allows."""

import resource

import pytest

from events.process.descriptors import ENOUGH, Limits, TooFewDescriptors, allow, require


class System:
    """A fake system with soft and hard limits."""

    def __init__(self, soft: int, hard: int) -> None:
        self.limits: Limits = (soft, hard)

    def allow(self, wanted: int = 0) -> int:
        return allow(wanted, lambda _: self.limits, lambda _, limits: setattr(self, "limits", limits))


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, ENOUGH),
        (1024, 1 << 30, ENOUGH),
        (1 << 20, 1 << 20, 1 << 20),
    ],
)
def test_the_limit_is_raised_as_far_as_allowed_and_never_lowered(soft: int, hard: int, then: int) -> None:
    system = System(soft, hard)
    assert system.allow(1000) == then
    assert system.limits == (then, hard)


def test_a_limit_that_is_too_low_is_reported() -> None:
    with pytest.raises(TooFewDescriptors, match=r"4064 open files are needed, but 4000 are allowed"):
        System(1024, 4000).allow(4064)


def test_a_fleet_is_refused_before_it_starts_if_its_frontends_could_not_reach_all_workers() -> None:
    limits = System(1024, 1024).limits
    assert require(1024, "start fewer workers", lambda _: limits) == 1024
    with pytest.raises(TooFewDescriptors, match=r"1128 .* 1024 .*raise the limit, or start fewer workers"):
        require(1128, "start fewer workers", lambda _: limits)
    assert limits == (1024, 1024)
