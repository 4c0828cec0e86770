"""The pictures of docs/post-mortems.md: three faults, rehearsed, each with its report as a browser shows it.

python tests/e2e/post_mortems.py     # two minutes; wants a chromium (make chromium)
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "post-mortems"
FAULTS = {"corrupt": 2.0, "kill": None, "hang": None}
WIDTH, HEIGHT = 1200, 1000
CALM_S, ENDS_WITHIN_S = 3.0, 60.0


async def rehearsed(fault: str, argument: float | None, folder: Path) -> Path:
    """Break a fleet under load, wait for the end of the incident, and return its report."""
    from rehearsal import FLAGS, users

    from controller.demo.fleet import DemoFleet

    fleet = DemoFleet.start(folder / fault, *FLAGS)
    try:
        await fleet.ready()
        await fleet.healthy(3)
        async with users(fleet):
            await asyncio.sleep(2 * CALM_S)
            await fleet.act(fault, "w0", argument)
            if fault == "hang":
                await asyncio.sleep(CALM_S)
                await fleet.act("unhang", "w0", None)
            async with asyncio.timeout(ENDS_WITHIN_S):
                while not any(event.fact.kind() == "incident_closed" for event in await fleet.events()):  # noqa: ASYNC110
                    await asyncio.sleep(1.0)
            await asyncio.sleep(CALM_S)
            where = folder / f"{fault}.html"
            command = [sys.executable, "-m", "controller.cli", "replay", "report", "--data", str(fleet.data)]
            await asyncio.to_thread(
                subprocess.run, [*command, "-o", str(where)], check=True, timeout=ENDS_WITHIN_S
            )
    finally:
        await asyncio.to_thread(fleet.stop)
    return where


async def main() -> None:
    """Rehearse all, and draw them."""
    from benchmarks import browser

    if browser.installed() is None:
        raise SystemExit(browser.NONE)
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
