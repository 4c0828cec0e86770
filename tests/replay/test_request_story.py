"""The story of one request, as built from its events on the journal."""

import argparse
import json
from dataclasses import replace
from typing import Any

import pytest
from fleet_history import History
from test_replay_commands import journal

from controller.replay import cli, flags
from controller.replay.request_story import ExposedSpan, story_of
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
                "  ran on w0, then w1, then w2",
                "  migrated 2 times, token for token; longest gap 120 ms",
            ],
        ),
        (
            (moved("w0", "w1", 50, exact=False), LOST),
            [
                "request r (llama)",
                "  ran on w0, then w1",
                "  migrated 1 time, approximately; longest gap 50 ms",
                "  was lost after 12 tokens: no_worker",
            ],
        ),
        (
            (exposed("w0", 0, 59),),
            ["request r (llama)", "  ran on w0", "  holds tokens 0–59 from w0, which was convicted"],
        ),
        (
            (PREEMPTED, RESUMED),
            [
                "request r (llama)",
                "  ran on w2, then w0",
                "  migrated 1 time, token for token; longest gap 1.5 s",
                "  was preempted 1 time",
            ],
        ),
    ],
    ids=["nothing", "moved", "lost", "exposed", "preempted"],
)
def test_a_story_is_summarized(facts: tuple[Observation, ...], said: list[str]) -> None:
    assert story_of("r", history(*facts).events).lines() == said


async def typed(made: History, *words: str) -> str:
    parser = argparse.ArgumentParser()
    flags.add_request_arguments(parser)
    said: list[str] = []
    assert await cli.execute(parser.parse_args(words), journal(made), None, said.append) == 0
    return "\n".join(said)


async def test_a_story_has_only_the_events_of_its_request() -> None:
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


async def test_a_request_without_events_is_explained() -> None:
    text = await typed(History(), "r")
    assert "has no event about request r" in text and "convicted" in text
    assert json.loads(await typed(History(), "r", "-o", "json"))["events"] == []


def reports(made: History, until_s: float, source: str = "frontend:f1") -> None:
    """Let a frontend report its traffic each minute for `until_s` seconds."""
    for _ in range(int(until_s // 60)):
        made.say(
            RequestsServed(
                worker="w1", instance="w1-1", frontend=source.partition(":")[2], count=1, tokens=1, ttft_ms=1.0,
                itl_ms=1.0, routed_under=0, window_s=1.0,
            ),
            source=source, seconds=60,
        )  # fmt: skip


async def test_a_request_cut_off_by_the_end_of_its_frontend_is_reported() -> None:
    """The frontend reports for three minutes after the move and then stops, while the fleet continues."""
    made = history(moved("w0", "w1", 120))
    reports(made, 180)
    ended = made.now
    reports(made, 600, source="frontend:f2")
    text = await typed(made, "r")
    assert f"was cut off when the frontend f1 ended; it last reported at {ended:%H:%M:%S} UTC" in text
    found = json.loads(await typed(made, "r", "-o", "json"))
    assert found["cut"] == {"frontend": "f1", "ended": ended.isoformat()}


async def test_a_restarted_frontend_has_cut_off_its_earlier_requests() -> None:
    made = history(moved("w0", "w1", 120))
    reports(made, 300, source="frontend:f2")
    reports(made, 120)
    assert json.loads(await typed(made, "r", "-o", "json"))["cut"]["frontend"] == "f1"


@pytest.mark.parametrize("end", [None, LOST, replace(exposed("w1", 0, 3), finished=True)])
async def test_a_request_of_a_living_frontend_and_an_ended_request_are_not_cut_off(
    end: Observation | None,
) -> None:
    """Requests of a living frontend, lost requests and finished ones were not cut off."""
    made = history(moved("w0", "w1", 120), *([end] if end else []))
    if end is None:
        reports(made, 900)
    else:
        reports(made, 900, source="frontend:f2")
    assert json.loads(await typed(made, "r", "-o", "json"))["cut"] is None
    assert "was cut off" not in await typed(made, "r")


def test_spans_are_kept_apart() -> None:
    story = story_of("r", history(exposed("w0", 0, 3), exposed("w1", 8, 9)).events)
    assert story.exposed == [ExposedSpan("w0", 0, 3), ExposedSpan("w1", 8, 9)]
