"""A compromised worker registers false claims: another's process, a folder, KV blocks."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from fleet import holdfast, streamed, undisturbed
from rogue_fleet import instances, reported, with_rogue
from waits import until

from benchmarks.attack.rogue import RogueWorker
from events.observations import WorkerJoined
from events.token_bytes import BUILTIN_FILE

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PROMPT_TOKENS = 96  # six blocks of 16


async def test_a_foreign_process_is_not_signalled(tmp_path: Path) -> None:
    victim = await asyncio.create_subprocess_exec("sleep", "120")
    try:
        about: dict[str, Any] = {"changed": lambda joined: replace(joined, pid=victim.pid)}
        async with with_rogue(tmp_path, **about) as (fleet, rogue):
            await rogue.bus.close()  # it ignores requests: the controller has to signal its process
            done = await asyncio.to_thread(holdfast, "restart", "x0", "--data", str(fleet.data))
            assert done.returncode != 0 and "is not its own" in done.stdout + done.stderr, done
            fact = await reported(fleet, f"have process {victim.pid} signalled")
            assert fact.who == "worker-x0" and victim.returncode is None
    finally:
        victim.kill()
        await victim.wait()


def model_at(folder: Path) -> Callable[[WorkerJoined], WorkerJoined]:
    """Return the registration of a model with a chat template that never ends."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(BUILTIN_FILE.read_bytes())
    (folder / "chat_template.jinja").write_text(ENDLESS)
    return lambda joined: replace(joined, model="evil", tokenizer=str(folder))


async def test_an_endless_chat_template_stops_and_an_unapproved_folder_is_not_read(
    tmp_path: Path,
) -> None:
    inside = {"HOLDFAST_FRONTEND__MODEL_FOLDERS": str(tmp_path / "models")}
    async with with_rogue(tmp_path, environment=inside, changed=model_at(tmp_path / "models" / "evil")) as (
        fleet,
        _,
    ):
        before = {p["name"]: p["pid"] for p in (await fleet.status())["processes"]}
        asked = {"model": "evil", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        async with aiohttp.ClientSession() as session:

            async def ask() -> tuple[int, str]:
                async with session.post(f"{fleet.url}/v1/chat/completions", json=asked) as answer:
                    return answer.status, await answer.text()

            answers = [asyncio.ensure_future(ask()) for _ in range(4)]
            assert await streamed(fleet, [300, 301], 16) == undisturbed([300, 301], 16)
            async with asyncio.timeout(60):
                for status, text in await asyncio.gather(*answers):
                    assert status == 400 and "takes more than " in text
        elsewhere = model_at(tmp_path / "elsewhere" / "evil")
        async with RogueWorker(fleet.data, "y0", changed=elsewhere):
            fact = await reported(fleet, str(tmp_path / "elsewhere"))
            assert fact.who == "worker-y0"
        after = {p["name"]: p["pid"] for p in (await fleet.status())["processes"]}
        assert before.items() <= after.items(), "no process was restarted"


async def test_false_kv_claims_of_a_worker_are_dropped(tmp_path: Path) -> None:
    """Requests go to where their KV blocks are claimed to be, until several of them have found nothing there."""
    prompts = [[500 + number] * PROMPT_TOKENS for number in range(60)]
    async with with_rogue(tmp_path) as (fleet, rogue):
        before = await instances(fleet)
        rogue.claim(*prompts)
        (frontend,) = (p["url"] for p in (await fleet.status())["processes"] if p["role"] == "frontend")
        claimed = len(prompts) * PROMPT_TOKENS // 16
        async with aiohttp.ClientSession() as session:

            async def known() -> bool:
                async with session.get(f"{frontend}/metrics") as answer:
                    (blocks,) = re.findall(
                        r"^holdfast_router_kv_blocks (\S+)", await answer.text(), re.MULTILINE
                    )
                return float(blocks) >= claimed

            await until(known, what="the claims are known to the frontend")
        went: list[bool] = []
        for prompt in prompts:
            count = len(rogue.engine.asked)
            assert await streamed(fleet, prompt, 4) == undisturbed(prompt, 4)
            went.append(len(rogue.engine.asked) > count)
        fact = await reported(fleet, "claim cached prompts")
        assert (fact.who, fact.eject) == ("worker-x0", False)
        assert sum(went[:10]) == 10, "false claims attract requests at first"
        assert sum(went[-30:]) < 30, "and no longer, once they have proved wrong"
        assert await instances(fleet) == before


async def test_claims_of_more_kv_blocks_than_a_worker_has_are_dropped(tmp_path: Path) -> None:
    async with with_rogue(tmp_path, changed=few_blocks) as (fleet, rogue):
        rogue.claim(*([1000 + number] * 1600 for number in range(20)))
        fact = await reported(fleet, "KV blocks, and it has registered 1100")
        assert fact.who == "worker-x0"
        assert await streamed(fleet, [300, 301], 16) == undisturbed([300, 301], 16)


def few_blocks(joined: WorkerJoined) -> WorkerJoined:
    return replace(joined, profile=replace(joined.profile, kv_blocks=1100))
