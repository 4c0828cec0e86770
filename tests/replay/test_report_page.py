"""The report page in a real browser: its slider matches `replay at`, and it is accessible."""

import json
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from fleet_history import History
from playwright.async_api import Page
from test_report import journal, reported
from test_what_if import between, lived
from test_what_if import said as what_if_said

from benchmarks import browser
from controller.replay import travel

pytestmark = pytest.mark.skipif(browser.installed() is None, reason=browser.NONE)
COLUMNS = ("worker", "health", "weight", "breaker", "reason")


@pytest.fixture
def history() -> History:
    return History().start().corruption().recovery()


@pytest.fixture
async def written(history: History, tmp_path: Path) -> Path:
    where = tmp_path / "report.html"
    await reported(history, "--since", "1", "-o", str(where))
    return where


async def shown_state(page: Page) -> list[tuple[str, ...]]:
    rows = await page.locator("#state tbody tr").all()
    cells = [tuple([cell.strip() for cell in await row.locator("th, td").all_inner_texts()]) for row in rows]
    return [one for one in cells if one[1] != "absent"]


@pytest.mark.slow
async def test_the_slider_shows_the_fleet_as_replay_at_does(
    history: History, written: Path, tmp_path: Path
) -> None:
    async with browser.browser(tmp_path) as found, browser.opened(found, written) as (page, complaints):
        last = int(await page.locator("#time").get_attribute("max") or 0)
        assert last > 10
        for step in range(last + 1):
            await page.locator("#time").fill(str(step))
            said = await page.locator("#moment").inner_text()
            moment = travel.describe(await travel.at(journal(history), None, int(said.rpartition(" ")[2])))
            breakers = {row["worker"]: row["position"] for row in moment["breakers"]}
            wanted = [
                (row["worker"], row["health"], f"{row['weight']:g}", breakers[row["worker"]], row["reason"])
                for row in moment["workers"]
                if step or row["worker"]
            ]
            assert await shown_state(page) == wanted, said
        assert complaints == []


@pytest.mark.slow
async def test_the_chart_shows_utc_in_every_time_zone(written: Path, tmp_path: Path) -> None:
    places = []
    for zone in ("UTC", "Asia/Tokyo"):
        async with browser.browser(tmp_path) as found, browser.opened(found, written, zone=zone) as (page, _):
            ticks = await page.locator("#chart .xtick text").all_text_contents()
            places.append((ticks, await page.locator("#cursor").evaluate("one => one.style.left")))
    assert places[0] == places[1] and any("12:0" in tick for tick in places[0][0])


@pytest.mark.slow
async def test_the_slider_works_by_keyboard_and_moves_the_chart_cursor(written: Path, tmp_path: Path) -> None:
    async with browser.browser(tmp_path) as found, browser.opened(found, written) as (page, complaints):
        before = await page.locator("#moment").inner_text()
        await page.locator("#time").focus()
        for _ in range(5):
            await page.keyboard.press("ArrowRight")
        assert await page.locator("#time").input_value() == "5"
        assert await page.locator("#moment").inner_text() != before
        await page.locator("#back").press("Enter")
        assert await page.locator("#time").input_value() == "4"
        places = [await page.locator("#cursor").evaluate("one => one.style.left")]
        await page.locator("#time").fill("9")
        places.append(await page.locator("#cursor").evaluate("one => one.style.left"))
        await page.locator("#zoom-in").press("Enter")
        await page.wait_for_function(
            "left => document.getElementById('cursor').style.left !== left", arg=places[-1]
        )
        await page.locator("#zoom-all").press("Enter")
        await page.wait_for_function(
            "left => document.getElementById('cursor').style.left === left", arg=places[-1]
        )
        assert await page.locator("#state .state").count() == await page.locator("#state tbody tr").count()
        assert places[0] != places[1] and complaints == []


@pytest.mark.slow
async def test_the_list_is_filtered_and_downloaded_as_shown(
    history: History, written: Path, tmp_path: Path
) -> None:
    async with browser.browser(tmp_path) as found, browser.opened(found, written) as (page, complaints):

        async def count(text: str) -> None:
            await page.wait_for_function(
                "text => document.getElementById('shown').textContent.startsWith(text)", arg=text
            )

        whole = len(history.events)
        await page.locator("#routine").check()
        await count(f"{whole} of {whole}")
        await page.locator("#filter").fill("w2 breaker_opened")
        await count(f"1 of {whole}")
        async with page.expect_download() as downloading:
            await page.locator("#download").click()
        await (await downloading.value).save_as(tmp_path / "events.jsonl")
        (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert event["kind"] == "breaker_opened" and event["body"]["worker"] == "w2" and "found" not in event
        await page.locator("#list summary").first.click()
        assert '"breaker_opened"' in await page.locator("#list pre").first.inner_text()
        await page.locator(".causes a").first.click()
        assert await page.locator("#list tr.named").count() == 1
        assert complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
async def test_axe_finds_no_accessibility_violations(written: Path, tmp_path: Path, dark: bool) -> None:
    async with browser.browser(tmp_path) as found, browser.opened(found, written, dark=dark) as (page, _):
        violations = (await Axe().run(page)).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in violations] == []


@pytest.mark.slow
async def test_a_sweep_page_is_drawn_without_network_and_is_accessible(tmp_path: Path) -> None:
    """Six panels over twelve values, and a table with the same data; in light and dark."""
    where = tmp_path / "sweep.html"
    await what_if_said(lived(between("w1", 40, 95)), "--sweep", "canary.interval=1s..60s", "-o", str(where))
    async with browser.browser(tmp_path) as found:
        for dark in (False, True):
            async with browser.opened(found, where, dark=dark) as (page, complaints):
                assert await page.locator("#chart .cartesianlayer .subplot").count() == 6
                assert await page.locator("tbody tr").count() == 12
                violations = (await Axe().run(page)).response["violations"]
                assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in violations] == []
                assert complaints == []
