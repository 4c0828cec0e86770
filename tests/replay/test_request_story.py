"""What became of one request, from what the journal has of it."""

import argparse
import json
from dataclasses import replace
from typing import Any

import pytest
from made_history import History
from test_replay_commands import journal

from controller.replay import cli
from controller.replay.request_story import ExposedSpan, told
from events.fact import Observation
from events.observations import (
    RequestAbandoned,
    RequestExposed,
    RequestMigrated,
    RequestPreempted,
    RequestResumed,
    RequestsServed,
)

OF: dict[str, Any] = {"frontend": "f1", "request": "r", "model": "llama"}


def moved(source: str, target: str, gap_ms: float, **more: Any) -> RequestMigrated:
    about: dict[str, Any] = {
        "cause": "stalled",
        "method": "reprefill",
        "tokens": 7,
        "attempt": 2,
        "exact": True,
    }
    return RequestMigrated(
        **OF, source=source, source_instance=f"{source}-1", target=target, target_instance=f"{target}-1",
        gap_ms=gap_ms, **about | more,
    )  # fmt: skip


def exposed(worker: str, first: int, last: int) -> RequestExposed:
    return RequestExposed(
        **OF, worker=worker, instance=f"{worker}-1", first=first, last=last, finished=False, action="continue"
    )


PREEMPTED = RequestPreempted(**OF, tier="best_effort", worker="w2", instance="w2-1", tokens=9)
RESUMED = RequestResumed(
    **OF, source="w2", target="w0", target_instance="w0-1", tokens=9, gap_ms=1500.0, exact=True
)
LOST = RequestAbandoned(**OF, worker="w1", instance="w1-1", reason="no_worker", tokens=12)


def history(*facts: Observation) -> History:
    made = History()
    made.say(*facts, source="frontend:f1")
    return made


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ((), []),
        (
            (moved("w0", "w1", 120), moved("w1", "w2", 80)),
            [
                "request r (llama)",
                "  was with w0, then w1, then w2",
                "  went on elsewhere 2 times, token for token; longest gap 120 ms",
            ],
        ),
        (
            (moved("w0", "w1", 50, exact=False), LOST),
            [
                "request r (llama)",
                "  was with w0, then w1",
                "  went on elsewhere 1 time, not exactly as it would have; longest gap 50 ms",
                "  was lost after 12 tokens: no_worker",
            ],
        ),
        (
            (exposed("w0", 0, 59),),
            ["request r (llama)", "  was with w0", "  holds tokens 0–59 from w0, which was convicted"],
        ),
        (
            (PREEMPTED, RESUMED),
            [
                "request r (llama)",
                "  was with w2, then w0",
                "  went on elsewhere 1 time, token for token; longest gap 1.5 s",
                "  was put off for others 1 time",
            ],
        ),
    ],
    ids=["nothing", "moved", "lost", "exposed", "put off"],
)
def test_a_story_says_what_matters_first(facts: tuple[Observation, ...], said: list[str]) -> None:
    assert told("r", history(*facts).events).lines() == said


async def typed(made: History, *words: str) -> str:
    parser = argparse.ArgumentParser()
    cli.add_request_arguments(parser)
    said: list[str] = []
    assert await cli.execute(parser.parse_args(words), journal(made), None, said.append) == 0
    return "\n".join(said)


async def test_it_is_told_with_its_events_and_without_those_of_others() -> None:
    made = history(moved("w0", "w1", 120), exposed("w0", 0, 6))
    others = {"frontend": "f1", "request": "other", "model": "llama"}
    made.say(
        RequestAbandoned(**others, worker="w1", instance="w1-1", reason="no_worker", tokens=1),
        source="frontend:f1",
    )
    text = await typed(made, "r")
    assert text.startswith("request r (llama)\n") and "other" not in text
    assert text.count("r moved from w0 to w1") <= 1 and len(text.splitlines()) >= 5
    found = json.loads(await typed(made, "r", "-o", "json"))
    assert (found["workers"], found["gaps_ms"], found["lost"]) == (["w0", "w1"], [120], "")
    assert found["exposed"] == [{"worker": "w0", "first": 0, "last": 6}]
    assert [event["kind"] for event in found["events"]] == ["request_migrated", "request_exposed"]


async def test_of_one_to_which_nothing_happened_it_is_said_why_nothing_is_known() -> None:
    text = await typed(History(), "r")
    assert "says nothing of request r" in text and "convicted" in text
    assert json.loads(await typed(History(), "r", "-o", "json"))["events"] == []


def reports(made: History, until_s: float, source: str = "frontend:f1") -> None:
    """Let a frontend report its traffic each minute for so long."""
    for _ in range(int(until_s // 60)):
        made.say(
            RequestsServed(
                worker="w1", instance="w1-1", frontend=source.partition(":")[2], count=1, tokens=1, ttft_ms=1.0,
                itl_ms=1.0, routed_under=0, window_s=1.0,
            ),
            source=source, seconds=60,
        )  # fmt: skip


async def test_a_request_that_a_dying_frontend_cut_says_so() -> None:
    """The frontend reported for three minutes after the move and then nothing, while the fleet went on."""
    made = history(moved("w0", "w1", 120))
    reports(made, 180)
    ended = made.now
    reports(made, 600, source="frontend:f2")
    text = await typed(made, "r")
    assert f"was cut by the frontend f1, which ended: it reported last at {ended:%H:%M:%S} UTC" in text
    found = json.loads(await typed(made, "r", "-o", "json"))
    assert found["cut"] == {"frontend": "f1", "ended": ended.isoformat()}


async def test_a_frontend_that_began_anew_has_cut_what_it_answered_before() -> None:
    made = history(moved("w0", "w1", 120))
    reports(made, 300, source="frontend:f2")
    reports(made, 120)
    assert json.loads(await typed(made, "r", "-o", "json"))["cut"]["frontend"] == "f1"


@pytest.mark.parametrize("end", [None, LOST, replace(exposed("w1", 0, 3), finished=True)])
async def test_a_frontend_that_lives_or_has_said_the_end_has_cut_nothing(end: Observation | None) -> None:
    """A living frontend's request, a lost one and a finished one were not cut."""
    made = history(moved("w0", "w1", 120), *([end] if end else []))
    if end is None:
        reports(made, 900)
    else:
        reports(made, 900, source="frontend:f2")
    assert json.loads(await typed(made, "r", "-o", "json"))["cut"] is None
    assert "was cut by" not in await typed(made, "r")


def test_spans_are_kept_apart() -> None:
    story = told("r", history(exposed("w0", 0, 3), exposed("w1", 8, 9)).events)
    assert story.exposed == [ExposedSpan("w0", 0, 3), ExposedSpan("w1", 8, 9)]
