"""A rotated API key of an upstream is used within seconds, without a restart."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_contract import Rig, prompt
from structlog.testing import capture_logs
from upstream import Upstream

from workers.engines.openai.engine import OpenAIEngine
from workers.engines.openai.identity import UpstreamSettings
from workers.engines.openai.upstream_reports import AccountTimes

Eventually = Callable[..., Awaitable[None]]
OLD, NEW = "sk-old", "sk-new"


@dataclass
class Keyed:
    upstream: Upstream
    rig: Rig
    file: Path


@pytest.fixture
async def keyed(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Keyed]:
    upstream, file = await Upstream(key=OLD).start(), tmp_path / "key"
    file.write_text(f"{OLD}\n")
    times = AccountTimes(key_s=getattr(request, "param", 3600.0))
    rig = Rig(OpenAIEngine(UpstreamSettings(url=upstream.url, key=OLD, key_file=file, times=times)))
    await rig.start()
    yield Keyed(upstream, rig, file)
    await rig.engine.stop()
    await upstream.stop()


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("canary", [False, True])
async def test_a_request_with_a_refused_key_is_retried_with_the_rotated_key(
    keyed: Keyed, canary: bool, status: int
) -> None:
    """The file is read at a 401 or 403; that request is repeated, and its client notices nothing."""
    keyed.upstream.key, keyed.upstream.denied = NEW, status
    keyed.file.write_text(f"{NEW}\n")
    assert (await keyed.rig.ask(prompt(), canary=canary)).finish == "length"


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_that_was_not_rotated_is_tried_once_and_never_shown(
    keyed: Keyed, status: int
) -> None:
    """While the file still has the old key, the upstream is asked once per request, and errors quote no key."""
    keyed.upstream.key, keyed.upstream.denied = NEW, status
    answer = await keyed.rig.ask(prompt())
    assert str(answer.error).startswith(f"engine_error: the upstream answers {status}")
    assert OLD not in str(answer.error)
    keyed.file.write_text(f"{NEW}\n")
    assert (await keyed.rig.ask(prompt())).finish == "length"


@pytest.mark.parametrize("keyed", [0.02], indirect=True)
async def test_a_changed_file_is_read_without_any_request(keyed: Keyed, eventually: Eventually) -> None:
    """Files are read again on change: no request has to fail first."""
    with capture_logs() as logs:
        keyed.file.write_text("")  # it is being written
        await eventually(lambda: any(log["event"] == "upstream_key_unreadable" for log in logs))
        await asyncio.sleep(0.1)  # the file is read five more times; no read is logged again
        assert (await keyed.rig.ask(prompt())).finish == "length"  # the last good key stays in use
        keyed.upstream.key = NEW
        keyed.file.write_text(f"{NEW}\n")
        await eventually(lambda: any(log["event"] == "upstream_key_replaced" for log in logs))
    assert len([log for log in logs if log["event"] == "upstream_key_unreadable"]) == 1
    assert (await keyed.rig.ask(prompt())).finish == "length"
    assert len(keyed.upstream.bodies) == 2  # none of which was refused
