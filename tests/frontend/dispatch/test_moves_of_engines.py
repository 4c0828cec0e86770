"""Every request feature across a move, on the simulated engine.

Real models are tested in `tests/workers/transformers_engine`.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from move_contract import COUNT, Made, MoveContract, Moving, Pair, inside_characters

from events.token_bytes import BUILTIN_FILE
from workers.engines.engine import Engine
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.language import FIRST, VOCABULARY
from workers.engines.simulated.sequence import EngineShape

SHAPE = EngineShape(context_tokens=2048, kv_blocks=512)


class TestSimulated(MoveContract):
    """At full speed. Each token is a complete text."""

    @pytest.fixture
    def made(self) -> Made:
        return lambda: SimulatedEngine(SHAPE)


class TestDividedCharacters(Moving):
    """The same engine with a vocabulary in which each word begins and ends inside a character."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        whole = json.loads(BUILTIN_FILE.read_text(encoding="utf-8"))
        vocabulary = whole["model"]["vocab"]
        words = {f"©{token:x}Ã": token for token in range(FIRST, VOCABULARY)}  # bytes a9 … c3: c3 a9 is an é
        vocabulary = {name: token for name, token in vocabulary.items() if token < FIRST} | words
        whole["model"] |= {"vocab": vocabulary, "merges": []}
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")

        def engine() -> Engine:
            made = SimulatedEngine(SHAPE)
            made.identity = replace(made.identity, tokenizer=str(tmp_path))
            return made

        return engine

    async def test_characters_survive_a_cut_inside_them(self, pair: Pair, tmp_path: Path) -> None:
        tokens = await self.tokens(pair.kit)
        assert inside_characters(str(tmp_path), tokens) == [*range(1, COUNT + 1)]
        whole, events = await self.same(pair, (1, 9, COUNT - 1 - pair.late))
        assert whole["choices"][0]["text"].count("é") == COUNT - 1
        text = "".join(choice["text"] for event in events[:-2] for choice in event["choices"])
        assert text == whole["choices"][0]["text"]
