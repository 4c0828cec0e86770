"""docs/guides/webhooks.md: its example receiver runs, and its tables match the code."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from notifier_world import KEY
from typed_commands import run_command
from waits import until

from controller.adapters.embedded.free_port import free_port
from controller.webhooks.retry_policy import AWAY, RETRY_AFTER_MAX_S
from controller.webhooks.settings import DEFAULT_KINDS, NotifierSettings
from events.dead_letters import BYTES_MAX, LETTERS_MAX

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "webhooks.md").read_text()
LINES_MAX = 18
OTHER_KEY = KEY.replace("whsec_AAEC", "whsec_AAED")


async def test_the_receiver_verifies_and_prints(tmp_path: Path) -> None:
    (text,) = re.findall(
        r"^<!-- a test runs this program: receiver -->\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
    assert len([line for line in text.splitlines() if line.strip()]) <= LINES_MAX
    (file := tmp_path / "receiver.py").write_text(text)
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(file)),
        env={**os.environ, "WEBHOOK_KEY": KEY, "PORT": str(port)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        codes = {}
        for key in (KEY, OTHER_KEY):
            (secret := tmp_path / "key").write_text(key)
            words = ("webhooks", "test", f"http://127.0.0.1:{port}/", "--secret-file", str(secret))

            async def reached(words: tuple[str, ...] = words) -> subprocess.CompletedProcess[str] | None:
                done = await asyncio.to_thread(run_command, words, {})
                return None if "cannot be reached" in done.stdout else done

            done = await until(reached, 60)
            codes[key] = done.returncode, re.findall(r"answer  (\d+)", done.stdout)
        assert codes == {KEY: (0, ["204"]), OTHER_KEY: (1, ["401"])}
        async with asyncio.timeout(20):
            assert b"holdfast.incident_opened {'number': 0" in await process.stdout.readline()
    finally:
        process.kill()
        await process.communicate()


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_default_kinds_match_the_page() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("Default kinds"), re.MULTILINE)
    assert [kind for row in rows for kind in re.findall(r"`(\w+)`", row)] == [*DEFAULT_KINDS]


def test_the_limits_on_the_page_match_the_settings() -> None:
    said, settings = section("Delivery guarantees"), NotifierSettings()
    (away,) = re.findall(r"^\| none, 3xx, (.*?) \|", said, re.MULTILINE)
    assert {int(status) for status in away.split(", ")} == AWAY
    assert settings.tries_max == 8 and "after 8 tries" in said
    assert settings.timeout_s == 10 and "within 10 s" in said
    assert settings.hold_s == 86_400 and "more than a day old" in said
    assert (settings.wait_min_s, settings.wait_max_s) == (1, 60) and "after 1 s, 2 s, … 60 s" in said
    assert RETRY_AFTER_MAX_S == 3_600 and "an hour at most" in said
    assert (LETTERS_MAX, BYTES_MAX >> 20) == (10_000, 64)
    assert "10,000 of them, 64 MiB and 30 days at most" in section("Dead letters")
