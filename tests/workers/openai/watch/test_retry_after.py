"""An upstream's 429, or 503 with Retry-After, closes its worker to new user requests for that long."""

from collections.abc import AsyncIterator

import pytest
from engine_contract import Rig, prompt
from upstream import Upstream

from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.upstream_health import RetryGate, retry_after_s

DATE = {"Date": "Sat, 28 Nov 2026 09:00:00 GMT"}


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    server = await Upstream().start()
    yield server
    await server.stop()


@pytest.fixture
async def rig(upstream: Upstream) -> AsyncIterator[Rig]:
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url, retry_after_max_s=30.0)))
    await rig.start()
    yield rig
    await rig.engine.stop()


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": "Sat, 28 Nov 2026 09:00:12 GMT", **DATE}, 12.0),
        ({"Retry-After": "Sat, 28 Nov 2026 08:00:00 GMT", **DATE}, 0.0),
        (
            {"Retry-After": "Sat, 28 Nov 2026 09:00:12 GMT"},
            None,
        ),  # a date has no meaning without the server's own clock
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-3"}, None),
        ({}, None),
    ],
)
def test_a_header_is_read_as_seconds_or_as_a_date(headers: dict[str, str], seconds: float | None) -> None:
    """Both forms of RFC 9110; the server's clock is never compared with a local one."""
    assert retry_after_s(headers) == seconds


def test_a_gate_opens_after_its_time() -> None:
    """The time is bounded. A 429 without a header closes for a second; a 503 without one is an ordinary failure."""
    now = 100.0
    gate = RetryGate(lambda: now, max_s=60.0)
    assert not gate.refused(503, {}, canary=False) and not gate.refused(
        500, {"Retry-After": "9"}, canary=False
    )
    assert gate.closed_s() == 0.0
    assert gate.refused(429, {}, canary=False) and gate.closed_s() == 1.0
    assert gate.refused(503, {"Retry-After": "100000"}, canary=False) and gate.closed_s() == 60.0
    assert gate.refused(429, {"Retry-After": "5"}, canary=False) and gate.closed_s() == 60.0  # not shortened
    assert gate.closed_s(canary=True) == 0.0
    now += 60.0
    assert gate.closed_s() == 0.0
    assert gate.refused(429, {"Retry-After": "5"}, canary=True)
    assert gate.closed_s() == gate.closed_s(canary=True) == 5.0


@pytest.mark.parametrize("status", [429, 503])
async def test_a_closed_worker_sends_its_upstream_no_user_requests(
    upstream: Upstream, rig: Rig, status: int
) -> None:
    """It reports the time with its load, refuses users as overloaded, and still lets the upstream answer canaries."""
    upstream.fault, upstream.retry_after = f"http_{status}", "20"
    answer = await rig.ask(prompt())
    assert answer.error == f"overloaded: the upstream answers {status}: told to answer {status}"
    assert 19.0 < rig.engine.load().closed_s <= 20.0
    asked = len(upstream.bodies)
    assert str((await rig.ask(prompt())).error).startswith(
        "overloaded: the upstream takes no new requests for "
    )
    assert len(upstream.bodies) == asked
    upstream.fault = ""
    assert (await rig.ask(prompt(), canary=True)).finish == "length"


async def test_a_refused_canary_is_not_resent_until_its_time(upstream: Upstream, rig: Rig) -> None:
    """The prober repeats a canary of a full worker five times a second; its upstream has set the time of the next try."""
    upstream.fault, upstream.retry_after = "http_429", "20"
    for _ in range(5):
        assert str((await rig.ask(prompt(), canary=True)).error).startswith("overloaded: ")
    assert len(upstream.bodies) == 1
