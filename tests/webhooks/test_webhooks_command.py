"""The output of `holdfast webhooks test`."""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest
from notifier_world import KEY
from standardwebhooks import Webhook as Verifier
from typed_commands import run_command
from webhook_receiver import receiving


async def typed(*words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_command, ("webhooks", *words), {})


async def test_a_sample_is_sent_and_the_response_is_printed(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text(KEY)
    async with receiving(202, 403) as receiver:
        good = await typed("test", f"{receiver.url}/a", "--secret-file", str(secret))
        bad = await typed("test", f"{receiver.url}/a", "--template", "slack")
    assert good.returncode == 0 and re.search(r"answer  202, after \d+ ms: accepted", good.stdout), (
        good.stderr
    )
    assert bad.returncode == 1 and "403" in bad.stdout and "says    as you wish" in bad.stdout
    first, second = receiver.all
    assert Verifier(KEY).verify(first.body, first.headers)["type"] == "holdfast.incident_opened"
    assert "this is a test" in json.loads(second.body)["text"]


@pytest.mark.slow
async def test_the_pagerduty_test_alert_is_resolved_again(tmp_path: Path) -> None:
    (secret := tmp_path / "key").write_text("A" * 32)
    async with receiving() as receiver:
        done = await typed("test", receiver.url, "--template", "pagerduty", "--secret-file", str(secret))
    assert done.returncode == 0, done.stderr
    said = [json.loads(one.body) for one in receiver.all]
    assert [one["event_action"] for one in said] == ["trigger", "resolve"]
    assert said[0]["dedup_key"] == said[1]["dedup_key"]


async def test_redirects_are_reported_and_not_followed() -> None:
    async with receiving((301, {"Location": "https://elsewhere/"})) as receiver:
        done = await typed("test", receiver.url)
    assert done.returncode == 1 and "redirects are not followed" in done.stdout and len(receiver.all) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("test", "http://127.0.0.1:1/"), "cannot be reached: Connection refused\n"),
        (("test", "nowhere"), "'nowhere' is not a webhook URL"),
        (("test", "http://x", "--template", "pagerduty"), "needs a secret file"),
    ],
)
async def test_invalid_arguments_are_reported(words: tuple[str, ...], says: str) -> None:
    done = await typed(*words)
    assert done.returncode != 0 and says in done.stdout + done.stderr
