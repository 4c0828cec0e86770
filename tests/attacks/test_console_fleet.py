"""The console of a real fleet, in a real browser, while the fleet is broken."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from fleet import running
from playwright.async_api import BrowserContext, Page
from rehearsal import FLAGS, users

from benchmarks import browser
from benchmarks.local_fleet import LocalFleet
from events.process.presence import present

pytestmark = pytest.mark.skipif(browser.installed() is None, reason=browser.NONE)
WITHIN_MS = 30_000


def console_of(fleet: LocalFleet) -> str:
    """Return the URL of a fleet's console."""
    (frontend,) = (one for one in present(fleet.data) if one.role == "frontend")
    return f"{frontend.url}/console"


@asynccontextmanager
async def looking(fleet: LocalFleet, home: Path) -> AsyncIterator[tuple[BrowserContext, Page, list[str]]]:
    """Open its console."""
    async with browser.browser(home) as found:
        context = await found.new_context(viewport={"width": 1280, "height": 1000})
        page, complaints = await context.new_page(), list[str]()
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(console_of(fleet))
        await page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=WITHIN_MS)
        yield context, page, complaints


async def until(page: Page, selector: str, text: str) -> None:
    await page.wait_for_function(
        "([selector, text]) => [...document.querySelectorAll(selector)].some((one) => one.textContent.includes(text))",
        arg=[selector, text], timeout=WITHIN_MS,
    )  # fmt: skip


@pytest.mark.attack
async def test_the_console_shows_a_failing_worker_its_post_mortem_and_a_request(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "fleet", *FLAGS) as fleet:
        await fleet.healthy(3)
        async with users(fleet), looking(fleet, tmp_path) as (context, page, complaints):
            await until(page, "#headline", "No user impact")
            await until(page, "#workers tbody tr", "w2")
            await page.evaluate("window.same = true")
            await fleet.act("corrupt", "w0", 2.0)
            await until(page, "#workers tbody tr:first-child", "UNHEALTHY")
            assert (await page.locator("#workers tbody tr th").first.inner_text()) == "w0"
            await until(page, "#headline", "tokens of a convicted worker")
            await until(page, "#incidents tbody tr", "worker w0")
            await until(page, "#events tbody tr", "holds tokens")

            exposed = next(e.fact for e in await fleet.events() if e.fact.kind() == "request_exposed")
            await page.locator("#request").fill(exposed.request)  # type: ignore[attr-defined]
            await page.locator("#ask button").click()
            await until(page, "#story", "from w0, which was convicted")

            async with context.expect_page() as opened:
                await page.locator("#incidents a").first.click()
            report = await opened.value
            await report.wait_for_selector("html[data-ready=yes]", state="attached", timeout=WITHIN_MS)
            assert "worker w0, token_mismatch" in await report.locator("h1").inner_text()
            assert await report.locator("#chart svg").count() > 0
            assert await report.evaluate("window.origin") == "null", "it could ask the console for anything"
            assert await page.evaluate("window.same"), "nothing has loaded the page again"
            assert complaints == []


async def until_answered(fleet: LocalFleet) -> None:
    """Look a request up while it is answered."""
    async with aiohttp.ClientSession() as http:
        body = {"model": "sim", "prompt": [300] * 20, "max_tokens": 400, "stream": True, "ignore_eos": True}
        async with http.post(f"{fleet.url}/v1/completions", json=body) as answer:
            id = answer.headers["X-Request-Id"]
            async with http.get(f"{console_of(fleet)}/request", params={"id": id}) as story:
                (now,) = (await story.json())["now"]
            assert now.startswith("is answered now, by w") and now.endswith(" so far")


@pytest.mark.attack
async def test_a_console_is_read_only_unless_it_may_act(tmp_path: Path) -> None:
    flags = ("--workers", "2", "--itl-ms", "10", "--canary-interval", "1")
    async with running(tmp_path / "shows", *flags) as fleet, aiohttp.ClientSession() as http:
        body = json.dumps({"verb": "drain", "worker": "w1"})
        async with http.post(f"{console_of(fleet)}/act", data=body) as answer:
            assert answer.status == 403 and "--console-actions" in (await answer.json())["error"]
        async with http.get(f"{fleet.url}/console") as answer:
            assert answer.status == 404, "the port of the API has no console"

    async with running(tmp_path / "acts", *flags, "--console-actions", stops=True) as fleet:
        await fleet.healthy(2)
        await until_answered(fleet)
        async with looking(fleet, tmp_path) as (_, page, complaints):
            page.on("dialog", lambda dialog: asyncio.create_task(dialog.accept()))
            await page.locator("#workers button", has_text="w1").click()
            await page.locator("#acts button", has_text="Drain").click()
            await until(page, "#done", "w1 will drain")
            await until(page, "#worker-facts", "DRAINING")
            await page.locator("#acts button", has_text="Resume").click()
            await until(page, "#done", "w1 will return to service")
            await until(page, "#worker-facts", "HEALTHY")
            asked = [e.fact for e in await fleet.events() if e.fact.kind() == "drain_requested"]
            assert [one.by for one in asked] == ["console of frontend-0, 127.0.0.1"]  # type: ignore[attr-defined]
            assert complaints == []
