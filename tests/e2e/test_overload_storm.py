"""Five times as many requests as a fleet can serve, for a minute, with a worker killed in the middle.

The clients are the official ones, with their default retries. Admitted requests are answered token for token, rejected ones get
an explicit response, and no rejection is recorded as a failure on the journal.
"""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import openai
import pytest
from fleet import holdfast, running, undisturbed
from waits import until

from benchmarks.local_fleet import LocalFleet
from events.decisions import SpareActivated
from events.observations import RequestAbandoned, RequestFailed, RequestMigrated, RequestsRejected

FLAGS = (
    "--workers",
    "2",
    "--spares",
    "1",
    "--itl-ms",
    "30",
    "--admission-control",
    "deadline",
    "--slo-ttft-ms",
    "2000",
)
SMALL = {
    "HOLDFAST_CONTROLLER__LIVENESS__ANSWER_S": "5",  # so that a worker paused by a busy machine is not declared dead
    "HOLDFAST_WORKER_BATCH_MAX": "2",
    "HOLDFAST_WORKER_WAITING_MAX": "2",
}
TOKENS = 20  # 0.6 s: two workers that run two at once answer 6 to 7 requests per second
RATE, SECONDS = 33.0, 60.0
PROMPTS = [[300 + n] * 8 for n in range(16)]
EXACT = [undisturbed(prompt, TOKENS) for prompt in PROMPTS]
REFUSED = (429, 503)


class Storm:
    """The outcomes of the requests."""

    def __init__(self, fleet: LocalFleet) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.sent = 0
        self._api = openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=120)

    async def run(self) -> None:
        """Send all of them at their times, and wait until the last has its answer."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            for number in range(int(RATE * SECONDS)):
                await asyncio.sleep(max(0.0, began + number / RATE - loop.time()))  # the rate of the storm
                group.create_task(self._ask(number))
                self.sent += 1
        await self._api.close()

    async def _ask(self, number: int) -> None:
        text, place = "", number % len(PROMPTS)
        try:
            stream = await self._api.completions.create(
                model="sim", prompt=PROMPTS[place], max_tokens=TOKENS, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for chunk in stream:
                text += chunk.choices[0].text if chunk.choices else ""
        except openai.APIStatusError as error:
            if error.status_code not in REFUSED or text:
                self.wrong.append(f"{error.status_code} after {text!r}: {error}")
            self.outcomes["refused"] += 1
            return
        except openai.OpenAIError as error:
            self.wrong.append(f"{type(error).__name__} after {text!r}: {error}")
            return
        self.outcomes["answered"] += 1
        if text != EXACT[place]:
            self.wrong.append(f"{text!r} is not the answer to {PROMPTS[place]}")


async def kill(fleet: LocalFleet, name: str) -> None:
    status = await fleet.status()
    os.kill(next(w["pid"] for w in status["workers"] if w["id"] == name), signal.SIGKILL)


@pytest.mark.attack
async def test_admitted_requests_are_answered_and_no_rejection_is_a_failure(tmp_path: Path) -> None:
    async with running(tmp_path / "fleet", *FLAGS, environment=SMALL, stops=True) as fleet:
        await fleet.healthy(2)
        storm = Storm(fleet)
        going = asyncio.create_task(storm.run())
        await until(lambda: storm.sent >= RATE * SECONDS / 2, 4 * SECONDS)  # a busy machine sends late
        await kill(fleet, "w0")
        await going
        facts = [event.fact for event in await fleet.events()]
        verified = await asyncio.to_thread(holdfast, "replay", "verify", "--data", str(fleet.data))
    assert not storm.wrong, storm.wrong[:5]
    assert storm.outcomes.total() == int(RATE * SECONDS)
    assert storm.outcomes["answered"] >= 50 and storm.outcomes["refused"] >= 50, storm.outcomes
    assert not [fact for fact in facts if isinstance(fact, RequestAbandoned)]
    failed = [fact for fact in facts if isinstance(fact, RequestFailed)]
    assert {fact.worker for fact in failed} <= {"w0"}, failed
    assert {fact.source for fact in facts if isinstance(fact, RequestMigrated)} <= {"w0"}
    assert [fact.replaces for fact in facts if isinstance(fact, SpareActivated)] == ["w0"]
    assert (
        sum(fact.count for fact in facts if isinstance(fact, RequestsRejected)) >= storm.outcomes["refused"]
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
