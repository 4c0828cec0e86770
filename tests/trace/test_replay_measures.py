"""Measurements: percentiles are nearly exact, memory is bounded, and a good answer meets every limit."""

import random
import re
from itertools import pairwise

import numpy as np
import pytest

from controller.trace.replay import measures, report
from controller.trace.replay.answer import ReplayedAnswer, failure
from controller.trace.replay.endpoint import Reply
from controller.trace.replay.measures import AnswerSlo, DurationHistogram, ReplayMeasures


def test_percentiles_are_exact_to_a_hundredth() -> None:
    chance, values = random.Random(1), DurationHistogram()
    drawn = [chance.lognormvariate(-3, 2) for _ in range(5000)]
    for one in drawn:
        values.add(one)
    shares = [0.01, 0.5, 0.9, 0.99, 1.0]
    expected = np.percentile(drawn, [100 * share for share in shares], method="inverted_cdf")
    assert values.percentiles(*shares) == pytest.approx(list(expected), rel=0.01)
    assert values.mean == pytest.approx(np.mean(drawn)) and values.count == 5000
    assert (values.min, values.max) == (min(drawn), max(drawn))


def test_extreme_values_are_counted() -> None:
    values = DurationHistogram()
    assert values.percentiles(0.5, 0.99) == [0.0, 0.0] and values.mean == 0
    for one in (0.0, -1e-9, 1e9):
        values.add(one)
    assert values.percentiles(1 / 3, 1.0) == [-1e-9, 1e9] or values.percentiles(1.0)[0] <= 1e9


def test_long_replays_keep_few_points() -> None:
    kept = ReplayMeasures(AnswerSlo(), points_max=64)
    for at in range(10_000):
        kept.sample(float(at))
    assert 16 <= len(kept.timeline.points) < 64
    steps = {b.at_s - a.at_s for a, b in pairwise(kept.timeline.points)}
    assert max(steps) <= 2 * min(steps) and kept.timeline.points[-1].at_s > 9_000


def event(text: str = "x", finish: str = "null") -> bytes:
    return b'{"choices":[{"text":"%s","finish_reason":%s}]}' % (text.encode(), finish.encode())


def answered(*at: float, asked: int, slo: AnswerSlo = AnswerSlo(), usage: bytes = b"") -> ReplayMeasures:  # noqa: B008 (frozen)
    """Return the measurements of one answer, requested at 10 s, with tokens at these times."""
    one = ReplayMeasures(slo)
    one.began = 10.0
    one.leaves()
    answer = ReplayedAnswer(10.0, first_token=one.first_token, gap=one.gap)
    for moment in at:
        answer.take(event(), moment)
    answer.take(b'{"choices":[],"usage":%s}' % usage if usage else b'{"choices":[]}', at[-1])
    answer.take(b"[DONE]", at[-1])
    one.ends(Reply(10.0, at[-1], 200), answer, asked)
    return one


def test_an_answer_in_numbers() -> None:
    usage = b'{"prompt_tokens":40,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":16}}'
    one = answered(10.5, 10.6, 10.9, asked=8, usage=usage)
    assert (one.ttft.max, one.itl.count, one.e2e.max) == pytest.approx((0.5, 2, 0.9))
    assert one.tpot.max == pytest.approx(0.1)  # 5 tokens in 3 events
    assert (one.tokens.output, one.tokens.events, one.shorter, one.tokens.input) == (5, 3, 1, 40)
    assert (one.tokens.cached, one.tokens.cached_of, one.tokens.cached_answers) == (16, 40, 1)
    assert (one.whole, one.failed, one.in_flight, one.in_flight_max, one.ended) == (1, 0, 0, 1, 10.9)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (AnswerSlo(ttft_s=0.6, tpot_s=0.25, itl_s=0.35), 1),
        (AnswerSlo(ttft_s=0.4), 0),
        (AnswerSlo(tpot_s=0.15), 0),
        (AnswerSlo(itl_s=0.25), 0),
    ],
)
def test_a_good_answer_meets_every_limit(slo: AnswerSlo, good: int) -> None:
    assert answered(10.5, 10.6, 10.9, asked=3, slo=slo).good == good


def test_goodput_is_a_share_of_ended_requests_and_rates_use_the_servers_token_count() -> None:
    one = answered(10.5, 10.6, asked=5, slo=AnswerSlo(ttft_s=0.6), usage=b'{"completion_tokens":5}')
    late = ReplayedAnswer(10.0)
    for said in (event(), b"[DONE]"):
        late.take(said, 10.9)
    for reply, answer in ((Reply(10.0, 10.9, 200), late), (Reply(10.0, 12.0, 503), ReplayedAnswer())):
        one.leaves()
        one.ends(reply, answer, 1)
    one.leaves()
    one.cuts()
    found = report.found(one, {})
    assert found["requests"] == {"sent": 4, "whole": 2, "failed": 1, "cut": 1, "shorter": 0}
    assert found["goodput"] == {
        "slo": {"ttft_ms": 600},
        "requests": 1,
        "share": 0.3333,
        "requests_per_s": 0.5,
    }
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (1.0, 3.0)


def failed(reply: Reply, *events: bytes) -> tuple[str, str]:
    answer = ReplayedAnswer()
    for one in events:
        answer.take(one, 1.0)
    return failure(reply, answer)


OK = Reply(0, 1, 200)


@pytest.mark.parametrize(
    ("reply", "events", "kind", "says"),
    [
        (OK, [event(), b"[DONE]"], "", ""),
        (OK, [event("", '"stop"'), b"[DONE]"], "", ""),
        (OK, [b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', b"[DONE]"], "", ""),
        (OK, [b'{"choices":[{"delta":{"reasoning":"hm"}}]}', b"[DONE]"], "", ""),
        (OK, [event(), b'{"choices":[],"usage":null,"error":null}', b"[DONE]"], "", ""),
        (OK, [event(), b'{"choices":null,"usage":{"completion_tokens":1}}', b"[DONE]"], "", ""),
        (
            OK,
            [event(), b'{"usage":{"completion_tokens":-1}}', b"[DONE]"],
            "malformed event",
            "completion_tokens",
        ),
        (OK, [event()], "incomplete", "ended without [DONE]"),
        (OK, [b"[DONE]"], "empty", "no token"),
        (OK, [b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', b"[DONE]"], "empty", "no token"),
        (OK, [event(), b"{broken", b"[DONE]"], "malformed event", "{broken"),
        (OK, [event(), b'{"error":{"message":"gone","code":"lost"}}'], "error event lost", "gone"),
        (OK, [event(), b'{"error":"gone"}'], "error event", "gone"),
        (Reply(0, 1, 200, b'{"object":"text_completion"}'), [], "incomplete", "text_completion"),
        (Reply(0, 1, 500, b"<html>\n oops"), [], "HTTP 500", "<html> oops"),
        (Reply(0, 1, 429, b'{"error":{"message":"slow down","code":7}}'), [], "HTTP 429 7", "slow down"),
        (Reply(0, 1, 200, fault="broke off", detail="closed"), [event()], "broke off", "closed"),
        (Reply(0, 1, 200, fault="broke off", detail="closed"), [event(), b"[DONE]"], "", ""),
        (Reply(0, 1, fault="timeout", detail="late"), [], "timeout", "late"),
        (
            Reply(0, 1, 500, b'{"error":{"message":"\\u001b[2J","code":"\\u0007"}}'),
            [],
            "HTTP 500 \ufffd",
            "\ufffd[2J",
        ),
    ],
)
def test_each_failure_has_a_kind(reply: Reply, events: list[bytes], kind: str, says: str) -> None:
    found = failed(reply, *events)
    assert found[0] == kind and says in found[1]


def test_kinds_of_errors_are_bounded() -> None:
    one = ReplayMeasures(AnswerSlo())
    for number in range(200):
        one.fails(f"kind {number}", f"sample {number}")
    assert len(one.errors) == measures.KINDS_MAX + 1 and sum(one.errors.values()) == 200
    assert one.samples["other"] == f"sample {measures.KINDS_MAX}"


def printed(one: ReplayMeasures) -> str:
    return "\n".join(report.tail(report.found(one, {})))


@pytest.mark.parametrize(("cpu_s", "starved"), [(0.1, True), (0.85, False)])
def test_a_late_generator_is_reported_with_its_cause(cpu_s: float, starved: bool) -> None:
    one = answered(10.5, 11.0, asked=2)
    one.generator.cpu_s = cpu_s
    one.generator.late.add(0.001)
    assert (one.generator.kept_up, printed(one)) == (True, "")
    one.generator.late.add(0.9)
    assert not one.generator.kept_up
    assert re.search(r"were sent (89\d|90\d) ms late", printed(one))
    assert ("other processes keep this machine busy" in printed(one)) == starved


def test_held_back_requests_are_reported() -> None:
    one = answered(10.5, 11.0, asked=2)
    one.generator.held.add(0.25)
    assert (
        one.generator.kept_up
        and "1 request was held back" in printed(one)
        and re.search(r"for 2[45]\d ms", printed(one))
    )
