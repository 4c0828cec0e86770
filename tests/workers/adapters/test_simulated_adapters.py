"""LoRA adapters of the simulated engine: other tokens, other names of blocks, and moves."""

from typing import Any

import msgspec
import pytest
from engine_contract import Rig, asked, prompt

from events import blocks
from events.kv import Stored
from workers.config.settings import WorkerSettings
from workers.engines.simulated.build import BadAdapters, build_simulated
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape

ADAPTERS = ("sql", "legal")


async def rig() -> Rig:
    rig = Rig(SimulatedEngine(EngineShape(adapters=ADAPTERS)))
    await rig.start()
    return rig


async def ask(rig: Rig, adapter: str, tokens: list[int] | None = None, **more: Any) -> list[int]:
    """Return the tokens of an answer, which must have no error."""
    key = rig.key()
    request = asked(key, tokens or prompt(), **{"max_tokens": 20, "ignore_eos": True, **more})
    rig.engine.submit(key, msgspec.structs.replace(request, adapter=adapter))
    answer = await rig.answer(key)
    assert answer.error is None
    return answer.tokens


async def test_each_adapter_has_its_own_answers_which_continue_on_any_worker() -> None:
    one, other = await rig(), await rig()
    answers = {adapter: await ask(one, adapter) for adapter in ("", *ADAPTERS)}
    assert len({tuple(tokens) for tokens in answers.values()}) == 3
    for adapter, tokens in answers.items():
        rest = await ask(other, adapter, prompt() + tokens[:8], max_tokens=12)
        assert rest == tokens[8:]
    wrong = await ask(other, "legal", prompt() + answers["sql"][:8], max_tokens=12)
    assert wrong != answers["sql"][8:]


async def test_adapters_share_no_cached_blocks() -> None:
    one = await rig()
    tokens = prompt(64)
    for adapter in ("sql", "legal", "sql"):
        await ask(one, adapter, tokens)
    first = [event.blocks[0] for _, events in one.announced for event in events if isinstance(event, Stored)]
    for adapter in ADAPTERS:
        assert blocks.BlockNames(tokens, blocks.seed(lora=adapter)).of(16)[0] in first
    cached = [answer.chunks[0].cached_tokens for answer in one.answers.values()]
    assert cached[:2] == [0, 0] and (cached[2] or 0) > 0


async def test_an_unknown_adapter_is_refused() -> None:
    one = await rig()
    key = one.key()
    request = msgspec.structs.replace(asked(key, prompt()), adapter="other")
    one.engine.submit(key, request)
    assert (
        await one.answer(key)
    ).error == "not_serving: this worker does not have the adapter of the request"
    assert isinstance(one.engine.reserve(one.key(), request, 100), str)


def test_adapters_come_from_the_settings() -> None:
    assert build_simulated(WorkerSettings(adapters="sql, legal")).identity.adapters == ("sql", "legal")
    for text in ("sql,", "sql,sql", ",".join(f"a{n}" for n in range(65)), "x" * 257):
        with pytest.raises(BadAdapters):
            build_simulated(WorkerSettings(adapters=text))
