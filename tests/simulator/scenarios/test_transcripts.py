"""Transcripts of scenarios, checked in so that a change of behaviour shows as a change of text.

`holdfast simulate --scenario group-failure --provisioned 1.0` writes one again (`> …/scenarios/group_failure_100.0.txt`); with
`--spares 1` it writes that of a fleet with a spare.
"""

import asyncio
from pathlib import Path

import pytest

from controller.cli import main
from controller.simulator.stories.group_failure import GroupFailure, transcript
from controller.simulator.world.kernel import SECOND
from events.decisions import SpareActivated

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("provisioned", [1.067, 1.0])
def test_one_gpu_of_a_group_fails_with_23_requests_in_flight(provisioned: float) -> None:
    expected = (HERE / f"group_failure_{provisioned:.1%}.txt".replace("%", "")).read_text()
    assert transcript(provisioned) == expected


def test_n21_the_level_is_none_if_fifteen_groups_meet_the_slo_and_level_1_if_they_do_not() -> None:
    assert "after the failure NONE" in (HERE / "group_failure_106.7.txt").read_text()
    assert "after the failure LEVEL_1" in (HERE / "group_failure_100.0.txt").read_text()


@pytest.mark.slow
def test_n18_with_a_spare_all_sixteen_groups_serve_again_at_once_and_the_level_stays() -> None:
    """A spare is a whole loaded group: it takes the place within a second, and the failed group returns after a minute."""
    expected = (HERE / "group_failure_100.0_spare.txt").read_text()
    assert transcript(1.0, spares=1) == expected
    assert "after the failure NONE" in expected
    failure = GroupFailure(1.0, spares=1)
    asyncio.run(failure.play())
    assert failure.first(SpareActivated, "g6") < SECOND, "in the first document it is restored after 61 s"


@pytest.mark.slow
def test_n15_what_is_computed_again_lies_within_one_and_a_half_times_the_even_spread() -> None:
    failure = GroupFailure(1.067)
    asyncio.run(failure.play())
    assert failure.load.total() > 23 * 2048 and failure.most_over_even <= 1.5


@pytest.mark.slow
def test_the_command_prints_the_transcript(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--scenario", "group-failure"]) == 0
    assert capsys.readouterr().out == (HERE / "group_failure_106.7.txt").read_text()
    assert main(["simulate", "--scenario", "group-failure", "--provisioned", "0"]) == 2
    assert "--provisioned 0: must be a number" in capsys.readouterr().err
    assert main(["simulate", "--scenario", "group-failure", "--spares", "17"]) == 2
    assert "--spares 17: must be a number" in capsys.readouterr().err
    assert main(["simulate", "--spares", "1"]) == 2
    assert "--spares applies to --scenario" in capsys.readouterr().err
    assert main(["simulate", "--scenario", "group-failure", "-o", "json"]) == 2
    assert "--scenario prints text only" in capsys.readouterr().err
