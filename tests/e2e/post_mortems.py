"""Makes the pictures of the pages on post-mortems, the console and what-if.

Those of docs/guides/post-mortems.md show three rehearsed faults, each with its report in a browser.

export PYTHONPATH=tests/fixtures:tests/e2e:.
python tests/e2e/post_mortems.py             # four minutes; needs a chromium (make chromium)
python tests/e2e/post_mortems.py console     # the console's alone
python tests/e2e/post_mortems.py what-if     # a sweep's alone
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from waits import until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "guides" / "post-mortems"
FAULTS = {"corrupt": 2.0, "kill": None, "hang": None}
WIDTH, HEIGHT = 1200, 1000
CALM_S, ENDS_WITHIN_S = 3.0, 60.0
CONSOLE = ROOT / "docs" / "guides" / "console" / "fleet.png"
CONSOLE_HEIGHT = 1250
SWEEP = ROOT / "docs" / "guides" / "what-if" / "sweep.png"


async def rehearsed(fault: str, argument: float | None, folder: Path) -> Path:
    """Break a fleet under load, wait for the end of the incident, and return its report."""
    from rehearsal import FLAGS, lasts, users

    from benchmarks.local_fleet import LocalFleet

    fleet = LocalFleet.start(folder / fault, *FLAGS)
    try:
        await fleet.ready()
        await fleet.healthy(3)
        async with users(fleet):
            await lasts(2 * CALM_S)
            await fleet.act(fault, "w0", argument)
            if fault == "hang":
                await lasts(CALM_S)
                await fleet.act("unhang", "w0", None)

            async def closed() -> bool:
                return any(event.fact.kind() == "incident_closed" for event in await fleet.events())

            await until(closed, ENDS_WITHIN_S, every_s=1.0)
            await lasts(CALM_S)
            where = folder / f"{fault}.html"
            command = [sys.executable, "-m", "controller.cli", "replay", "report", "--data", str(fleet.data)]
            await asyncio.to_thread(
                subprocess.run, [*command, "-o", str(where)], check=True, timeout=ENDS_WITHIN_S
            )
    finally:
        await asyncio.to_thread(fleet.stop)
    return where


async def console(folder: Path) -> None:
    """Break a fleet under load, and draw what its console shows meanwhile."""
    from rehearsal import FLAGS, lasts, users

    from benchmarks import browser
    from benchmarks.local_fleet import LocalFleet
    from events.process.presence import present

    fleet = LocalFleet.start(folder / "console", *FLAGS, "--slo-throughput", "40")
    try:
        await fleet.ready()
        await fleet.healthy(3)
        async with users(fleet):
            await lasts(5 * CALM_S)
            await fleet.act("corrupt", "w0", 2.0)
            await lasts(5 * CALM_S)
            await fleet.act("kill", "w1", None)
            await lasts(2 * CALM_S)
            (url,) = (one.url for one in present(fleet.data) if one.role == "frontend")
            async with browser.browser(folder) as found:
                page = await found.new_page(viewport={"width": WIDTH, "height": HEIGHT})
                await page.goto(f"{url}/console")
                await page.wait_for_selector("html[data-ready=yes]", state="attached")
                await lasts(CALM_S)
                CONSOLE.parent.mkdir(exist_ok=True)
                clip = {"x": 0, "y": 0, "width": WIDTH, "height": CONSOLE_HEIGHT}
                await page.screenshot(path=CONSOLE, clip=clip, full_page=True)  # type: ignore[arg-type]
    finally:
        await asyncio.to_thread(fleet.stop)


async def sweep(folder: Path) -> Path:
    """Let several workers answer wrongly for a while, one after another, and return the effect of other canary intervals."""
    from rehearsal import FLAGS, lasts, users

    from benchmarks.local_fleet import LocalFleet

    fleet, where = LocalFleet.start(folder / "sweep", *FLAGS), folder / "sweep.html"
    try:
        await fleet.ready()
        await fleet.healthy(3)
        async with users(fleet):
            for fault, worker, argument in (
                ("corrupt", "w0", 2.0),
                ("error", "w1", 1.0),
                ("corrupt", "w2", 1.0),
            ):
                await lasts(2 * CALM_S)
                await fleet.act(fault, worker, argument)
                await lasts(6 * CALM_S)
                await fleet.act("heal", worker, None)
                await lasts(6 * CALM_S)
            command = [sys.executable, "-m", "controller.cli", "replay", "what-if", "--data", str(fleet.data)]
            command += ["--sweep", "canary.interval=500ms..30s", "-o", str(where)]
            await asyncio.to_thread(subprocess.run, command, check=True, timeout=ENDS_WITHIN_S)
    finally:
        await asyncio.to_thread(fleet.stop)
    return where


async def swept() -> None:
    """Draw a sweep."""
    from benchmarks import browser

    with tempfile.TemporaryDirectory() as folder:
        page = await sweep(Path(folder))
        async with browser.browser(Path(folder)) as found, browser.opened(found, page) as (shown, complaints):
            SWEEP.parent.mkdir(exist_ok=True)
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": CONSOLE_HEIGHT}
            await shown.screenshot(path=SWEEP, clip=clip, full_page=True)  # type: ignore[arg-type]
            assert not complaints, complaints


async def main() -> None:
    """Rehearse all, and draw them."""
    from benchmarks import browser

    if browser.installed() is None:
        raise SystemExit(browser.NONE)
    if sys.argv[1:] != ["what-if"]:
        with tempfile.TemporaryDirectory() as folder:
            await console(Path(folder))
    if sys.argv[1:] != ["console"]:
        await swept()
    if sys.argv[1:]:
        return
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = {fault: await rehearsed(fault, argument, Path(folder)) for fault, argument in FAULTS.items()}
        async with browser.browser(Path(folder)) as found:
            for fault, page in pages.items():
                async with browser.opened(found, page) as (shown, complaints):
                    clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT}
                    await shown.screenshot(path=FOLDER / f"{fault}.png", clip=clip, full_page=True)  # type: ignore[arg-type]
                    assert not complaints, complaints


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / folder) for folder in (".", "tests", "tests/fixtures", "tests/e2e")]
    asyncio.run(main())
