"""A client learns whether its answer was continued by a server that may have chosen other tokens."""

from typing import Any

import pytest
from frontend_kit import Kit, failing, first_goes_to, frontend
from scripted_worker import ScriptedWorker

from events.observations import RequestMigrated

BODY: dict[str, Any] = {"model": "m", "prompt": [300, 301], "max_tokens": 8}
SEEDED = {"temperature": 0.7, "seed": 5}
COMMENT = ": holdfast exact=false"


async def lines_of(kit: Kit, **more: Any) -> list[str]:
    """Return the lines of a streamed answer."""
    async with kit.http.post(kit.url + "/v1/completions", json=BODY | more | {"stream": True}) as response:
        assert response.headers["X-Holdfast-Mode"] == "exact" and "X-Holdfast-Exact" not in response.headers
        return [line for line in (await response.text()).splitlines() if line]


@pytest.mark.parametrize(
    ("engine", "sampling", "exact"),
    [("openai", SEEDED, False), ("openai", {"temperature": 0}, True), ("simulated", SEEDED, True)],
)
async def test_a_continued_answer_says_whether_it_is_exact(
    engine: str, sampling: dict[str, Any], exact: bool
) -> None:
    async with frontend() as kit:
        first = failing("w1", "disconnect", after=3)
        await first_goes_to(kit, first, ScriptedWorker("w2"), engine=engine, root="weights")
        status, _, headers = await kit.post("/v1/completions", **BODY, **sampling)
        assert status == 200 and kit.said(RequestMigrated)[0].exact == exact
        assert headers.get("X-Holdfast-Exact") == (None if exact else "false")
    async with frontend() as kit:
        first = failing("w1", "disconnect", after=3)
        await first_goes_to(kit, first, ScriptedWorker("w2"), engine=engine, root="weights")
        *_, before, last = await lines_of(kit, **sampling)
        assert last == "data: [DONE]"
        assert before.startswith(COMMENT) != exact


async def test_an_answer_that_begins_elsewhere_is_exact() -> None:
    async with frontend() as kit:
        first = failing("w1", "disconnect", after=0)
        await first_goes_to(kit, first, ScriptedWorker("w2"), engine="openai", root="weights")
        *_, before, _ = await lines_of(kit, **SEEDED)
        assert not before.startswith(COMMENT)
        assert [fact.tokens for fact in kit.said(RequestMigrated)] == [0]


async def test_errors_name_the_mode_too() -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, _, headers = await kit.post("/v1/completions", **BODY, temperature=9)
        assert (status, headers["X-Holdfast-Mode"]) == (400, "exact")
