"""Runs chromium: Debian's, as `make chromium` unpacks it, or an installed one."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright

UNPACKED = Path(__file__).parents[1] / ".chromium"
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/pulseaudio")
NONE = "chromium is not installed: run `make chromium`"
WITHIN_MS = 30_000


def installed() -> str | None:
    """Return the path of a chromium; None: there is none."""
    unpacked = UNPACKED / "usr/lib/chromium/chromium"
    return str(unpacked) if (UNPACKED / ".installed").exists() else shutil.which("chromium")


@contextlib.asynccontextmanager
async def browser(home: Path) -> AsyncIterator[Browser]:
    """Run a headless browser."""
    where = installed()
    assert where is not None, NONE
    environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ} | {
        "HOME": str(home)
    }
    if where.startswith(str(UNPACKED)):
        environment |= {
            "LD_LIBRARY_PATH": ":".join(str(UNPACKED / one) for one in LIBRARIES),
            "FONTCONFIG_PATH": str(UNPACKED / "etc/fonts"),
            "XDG_DATA_DIRS": str(UNPACKED / "usr/share"),
        }
    async with async_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu"]  # the pages are our own, and a test may run as root
        found = await driver.chromium.launch(executable_path=where, env=dict(environment), args=flags)
        try:
            yield found
        finally:
            await found.close()


@contextlib.asynccontextmanager
async def opened(
    found: Browser, page: Path, *, dark: bool = False, zone: str = "UTC"
) -> AsyncIterator[tuple[Page, list[str]]]:
    """Open a page without a network, and wait until it is ready. Yield it, and its errors so far."""
    context = await found.new_context(
        viewport={"width": 1200, "height": 1000}, color_scheme="dark" if dark else "light", timezone_id=zone,
        offline=True, accept_downloads=True
    )  # fmt: skip
    try:
        shown, complaints = await context.new_page(), list[str]()
        shown.on(
            "console",
            lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
        )
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("request", lambda asked: complaints.append(asked.url) if not _own(asked.url, page) else None)
        await shown.goto(page.as_uri())
        await shown.wait_for_selector("html[data-ready=yes]", state="attached", timeout=WITHIN_MS)
        yield shown, complaints
    finally:
        await context.close()


def _own(url: str, page: Path) -> bool:
    return url == page.as_uri() or url.startswith(("data:", "blob:"))
