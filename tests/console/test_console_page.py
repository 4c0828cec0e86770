"""The console's page in a real browser: it shows the fleet, follows changes and is accessible."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from console_kit import ConsoleKit, console
from fleet_history import History
from playwright.async_api import Page

from benchmarks import browser
from controller.console.endpoints import TOKEN
from controller.replay.recent import TOLD_MAX
from events.observations import RequestAbandoned

pytestmark = pytest.mark.skipif(browser.installed() is None, reason=browser.NONE)
STORY = (
    "import json; print(json.dumps({'says': ['request r1 (llama)', '  ran on w2, then w0'], 'events': "
    "[{'at': '2026-03-01T12:00:03.250+00:00', 'text': 'r1 went from w2 to w0'}]}))"
)


@asynccontextmanager
async def shown(kit: ConsoleKit, home: Path, *, dark: bool = False) -> AsyncIterator[tuple[Page, list[str]]]:
    """Open the console. Yield the page and the errors that it has reported so far."""
    async with browser.browser(home) as found:
        context = await found.new_context(
            viewport={"width": 1280, "height": 1000}, color_scheme="dark" if dark else "light"
        )
        page, complaints = await context.new_page(), list[str]()
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((kit.url, "data:")) else complaints.append(request.url)
            ),
        )
        await page.goto(kit.url + "/console")
        await page.wait_for_selector("html[data-ready=yes]", state="attached")
        yield page, complaints
        await context.close()


def lost(request: str, **more: str) -> RequestAbandoned:
    about = {"frontend": "f", "model": "llama", "worker": "w1", "instance": "a", "reason": "no_worker"}
    return RequestAbandoned(request=request, tokens=1, **about | more)


async def names(page: Page) -> list[str]:
    return await page.locator("#workers tbody tr:not([hidden]) th").all_inner_texts()


async def until(page: Page, selector: str, text: str) -> None:
    await page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)", arg=[selector, text]
    )  # fmt: skip


@pytest.mark.slow
async def test_the_page_follows_a_worker_through_failure_and_recovery_without_a_reload(
    tmp_path: Path,
) -> None:
    history = History().start()
    async with console(history) as kit, shown(kit, tmp_path) as (page, complaints):
        assert await names(page) == ["w0", "w1", "w2"]
        assert "No user impact" in await page.locator("#headline").inner_text()
        kept = await page.locator("#workers tbody tr").nth(0).element_handle()
        assert kept is not None
        history.say(history.failed("w2", confirmed=True, reason="token_mismatch"))
        history.decide()
        kit.pass_on()
        await until(page, "#headline", "1 incident is open")
        assert await names(page) == ["w2", "w0", "w1"]
        assert "token_mismatch" in await page.locator("#workers tbody tr").nth(0).inner_text()
        assert await page.locator("#incidents a").count() == 1
        assert await page.locator("#lanes rect").count() >= 2
        assert await kept.evaluate("one => one.isConnected"), "an unchanged row keeps its element"
        for _ in range(8):
            history.say(history.passed("w2", check="recovery"))
            history.decide(seconds=30)
        kit.pass_on()
        await until(page, "#events tbody", "passed")
        assert complaints == []


@pytest.mark.slow
async def test_a_page_that_applied_all_changes_equals_a_new_page(tmp_path: Path) -> None:
    history = History().start()
    async with console(history) as kit, shown(kit, tmp_path) as (page, complaints):
        steps: tuple[Callable[[], object], ...] = (
            lambda: history.corruption(),
            lambda: history.say(*(lost(f"r{n}", worker=f"w{n}") for n in range(TOLD_MAX + 20))),
            lambda: history.recovery(),
        )
        for n, step in enumerate(steps):
            step()
            kit.pass_on()
            kit.streams = {"w0": n}
            await page.wait_for_function("seq => have.head.get('seq') === seq", arg=len(history.events))
        async with page.context.expect_page() as opened:
            await page.evaluate("window.open(location.href)")
        other = await opened.value
        await other.wait_for_selector("html[data-ready=yes]", state="attached")
        state = "JSON.stringify(Object.entries(have).sort().map(([name, rows]) => [name, [...rows].sort()]))"
        assert await page.evaluate(state) == await other.evaluate(state)
        assert await page.locator("#events tbody tr").count() == TOLD_MAX and complaints == []


@pytest.mark.slow
async def test_names_are_not_parsed_as_markup(tmp_path: Path) -> None:
    history, odd = History(), "<img src=x onerror=alert(1)>"
    history.say(history.joined(odd))
    history.say(lost(odd, model=odd, worker=odd, reason=odd))
    async with console(history) as kit, shown(kit, tmp_path) as (page, complaints):
        assert await names(page) == [odd]
        assert odd in await page.locator("#events tbody").inner_text()
        assert await page.locator("img").count() == 0 and complaints == []


async def test_the_page_can_be_used_with_the_keyboard_only(tmp_path: Path) -> None:
    history = History().start(12)
    async with (
        console(history, command=("python", "-c", STORY)) as kit,
        shown(kit, tmp_path) as (page, complaints),
    ):
        await page.locator("#find").focus()
        await page.keyboard.type("w11")
        assert await names(page) == ["w11"]
        await page.locator("#find").fill("")
        await page.locator("#workers button").first.focus()
        await page.keyboard.press("Enter")
        assert await page.locator("#worker-name").inner_text() == "w0"
        assert "--console-actions" in await page.locator("#acts").inner_text()
        await page.keyboard.press("Escape")
        assert not await page.locator("#worker").is_visible()
        await page.locator("#pause").focus()
        await page.keyboard.press("Enter")
        before = await page.locator("#events tbody tr").count()
        history.say(lost("r9"))
        kit.pass_on()
        await until(page, "#headline", "1 answer lost")
        assert await page.locator("#events tbody tr").count() == before
        await page.keyboard.press("Enter")
        await until(page, "#events tbody tr", "r9")
        await page.locator("#request").focus()
        await page.keyboard.type("r1")
        await page.keyboard.press("Enter")
        await until(page, "#story", "ran on w2, then w0")
        assert "12:00:03.250" in await page.locator("#story li").inner_text()
        assert complaints == []


async def test_a_worker_can_be_drained_from_the_page_if_actions_are_enabled(tmp_path: Path) -> None:
    async with console(History().start(), acts=True) as kit, shown(kit, tmp_path) as (page, complaints):
        asked: list[str] = []

        async def answer(dialog: object) -> None:
            asked.append(dialog.message)  # type: ignore[attr-defined]
            await (dialog.accept() if len(asked) > 1 else dialog.dismiss())  # type: ignore[attr-defined]

        page.on("dialog", answer)
        await page.locator("#workers button", has_text="w1").click()
        drain = page.locator("#acts button", has_text="Drain")
        await drain.click()
        assert kit.done == [] and asked == ["Drain: w1?"], "a dismissed confirmation does nothing"
        async with page.expect_request("**/console/act") as sent:
            await drain.click()
        assert (await sent.value).headers[TOKEN.lower()]
        await until(page, "#done", "w1: drain")
        ((verb, body),) = kit.done
        assert verb == "drain" and body["worker"] == "w1" and complaints == []


@pytest.mark.slow
async def test_a_lost_connection_is_shown_and_restored(tmp_path: Path) -> None:
    async with console(History().start()) as kit, shown(kit, tmp_path) as (page, _):
        await until(page, "#live", "live")
        await page.evaluate("source.close(); source.dispatchEvent(new Event('error'))")
        await until(page, "#live", "no connection")
        await until(page, "#live", "live")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
async def test_axe_finds_no_accessibility_violations(tmp_path: Path, dark: bool) -> None:
    history = History().start(12).corruption()
    async with console(history, acts=True) as kit, shown(kit, tmp_path, dark=dark) as (page, _):
        for opened in (False, True):
            if opened:
                await page.locator("#workers button").first.click()
            violations = (await Axe().run(page)).response["violations"]
            assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in violations] == []


@pytest.mark.slow
async def test_of_a_thousand_workers_unhealthy_ones_are_laid_out_first_and_the_rest_on_scrolling(
    tmp_path: Path,
) -> None:
    history = History()
    history.say(*(history.joined(f"w{n}") for n in range(1000)), seconds=0.01)
    async with console(history) as kit, shown(kit, tmp_path) as (page, complaints):
        assert len(await names(page)) == 200 and await page.locator("#workers tbody tr").count() == 1000
        assert await page.locator("#found").inner_text() == "1000 in total"
        await page.locator("#more").dispatch_event(
            "click"
        )  # scrolling lays out more before the button is reached
        assert len(await names(page)) >= 400
        await page.locator("#more").evaluate("one => one.parentElement.scrollTo(0, 1e6)")
        await page.wait_for_function(
            "() => document.querySelectorAll('#workers tbody tr:not([hidden])').length >= 600"  # no eval: the page forbids it
        )
        await page.locator("#find").fill("w999")
        assert await names(page) == ["w999"]
        history.say(history.failed("w777", confirmed=True, reason="token_mismatch"))
        history.decide()
        kit.pass_on()
        await page.locator("#find").fill("")
        await until(page, "#workers tbody tr:first-child", "w777")
        assert len(await names(page)) == 200 and complaints == []
