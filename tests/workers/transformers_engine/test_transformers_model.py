"""The forward pass: it matches transformers, and its bits do not depend on batches or cuts."""

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from events.wire import Sampling  # noqa: E402
from workers.engines.engine import EngineDead  # noqa: E402
from workers.engines.transformers.attention import Pool  # noqa: E402
from workers.engines.transformers.blocks import Blocks  # noqa: E402
from workers.engines.transformers.loading import load_model  # noqa: E402
from workers.engines.transformers.model import (  # noqa: E402
    Model,
    is_exact,
    make_exact,
)
from workers.engines.transformers.sequence import SequenceWork, TorchSequence  # noqa: E402
from workers.engines.transformers.settings import TransformersSettings  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip


class Reader:
    """Reads sequences through a model, in pieces chosen by the test."""

    def __init__(self, model: Model, blocks: int = 64) -> None:
        self.model = model
        self.blocks = Blocks(blocks, 16)
        self.pool: Pool = model.pool(blocks=blocks, block_tokens=16)

    def sequence(self, tokens: list[int]) -> TorchSequence:
        return TorchSequence(0, list(tokens), len(tokens), Sampling(max_tokens=1), 0)

    def read(self, *parts: tuple[TorchSequence, int]) -> Any:
        works = []
        for sequence, count in parts:
            while len(sequence.blocks) < self.blocks.needed(sequence.cached + count):
                sequence.blocks.append(self.blocks.take())
                self.pool.clear(sequence.blocks[-1:])
            works.append(SequenceWork(sequence, sequence.cached, count))
        logits = self.model.forward(sorted(works, key=lambda work: work.count > 1), self.pool)
        for work in works:
            work.sequence.cached += work.count
        return logits

    def last(self, tokens: list[int]) -> Any:
        sequence = self.sequence(tokens)
        return self.read((sequence, len(tokens)))[0]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    """The tiny model with the tile that is exact on this processor, as in an engine."""
    model = load_model(TransformersSettings(folder=tiny, context_tokens=1024))
    assert make_exact(model, model.pool(blocks=64, block_tokens=32), Blocks(64, 32))
    return model


def tokens(length: int, seed: int = 0, vocabulary: int = 2048) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(length)]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_family_computes_what_transformers_computes(family: str, tied: bool, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **SMALL, tie_word_embeddings=tied)
    causal: Any = transformers.AutoModelForCausalLM
    causal.from_config(config).save_pretrained(tmp_path)
    original = causal.from_pretrained(tmp_path)
    ours = Reader(load_model(TransformersSettings(folder=tmp_path, context_tokens=512)))
    asked = tokens(77, vocabulary=160)
    with torch.no_grad():
        expected = original(torch.tensor([asked])).logits[0, -1]
    assert torch.allclose(ours.last(asked), expected, atol=2e-4)


@pytest.mark.parametrize("pieces", [(90,), (1,) * 90, (64, 26), (5, 80, 5), (89, 1), (33, 1, 1, 55)])
def test_the_same_bits_however_a_prompt_is_cut(model: Model, pieces: tuple[int, ...]) -> None:
    reader = Reader(model)
    expected = reader.last(tokens(90))
    sequence = reader.sequence(tokens(90))
    for count in pieces:
        got = reader.read((sequence, count))
    assert torch.equal(got[0], expected)


@pytest.mark.parametrize("company", [1, 2, 3, 7, 12])
def test_the_same_bits_in_any_batch(model: Model, company: int) -> None:
    reader = Reader(model, blocks=256)
    expected = reader.last(tokens(70))
    sequence = reader.sequence(tokens(70))
    others = [reader.sequence(tokens(5 + 13 * n, n)) for n in range(1, company + 1)]
    for other in others:
        reader.read((other, len(other.tokens) - 1))
    reader.read((sequence, 69))
    got = reader.read((sequence, 1), *((other, 1) for other in others))
    assert torch.equal(got[0], expected)


def test_blocks_far_apart_are_gathered_with_the_same_bits(model: Model) -> None:
    reader = Reader(model, blocks=256)
    expected = reader.last(tokens(70))
    reader = Reader(model, blocks=256)
    sequence = reader.sequence(tokens(70))
    sequence.blocks = [250, 3, 127, 9, 64]
    reader.pool.clear(sequence.blocks)
    reader.read((sequence, 69))
    assert torch.equal(reader.read((sequence, 1))[0], expected)


def test_a_blocks_previous_content_has_no_effect(model: Model) -> None:
    reader = Reader(model)
    expected = reader.last(tokens(20))
    reader.pool.keys.fill_(torch.nan)
    reader.pool.values.fill_(torch.nan)
    fresh = reader.sequence(tokens(20))
    assert torch.equal(reader.read((fresh, 20))[0], expected)


def test_a_band_of_rows_at_a_time_gives_the_same_bits(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Reader(model).last(tokens(90))
    monkeypatch.setattr("workers.engines.transformers.attention.SCRATCH_FLOATS_MAX", 4096)
    assert torch.equal(Reader(model).last(tokens(90)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_at_start_finds_this_machine_exact_and_leaves_no_block(tiny: Path, dtype: str) -> None:
    model = load_model(TransformersSettings(folder=tiny, dtype=dtype, context_tokens=1024))
    blocks = Blocks(64, 32)
    exact = make_exact(model, model.pool(blocks=64, block_tokens=32), blocks)
    assert exact or dtype == "bfloat16"  # some processors with AMX add differently in a batch, with any tile
    assert blocks.used == 0


def test_the_check_at_start_detects_an_influence_of_the_batch(model: Model) -> None:
    class BatchDependent(Model):
        def forward(self, works: Any, pool: Pool, *, every: bool = False) -> Any:
            return super().forward(works, pool, every=every) + 1e-7 * len(works)

    sociable = BatchDependent(model.module, context_tokens=1024)
    assert not is_exact(sociable, sociable.pool(blocks=64, block_tokens=32), Blocks(64, 32))


def test_the_check_at_start_compares_every_token_of_a_prompt(model: Model) -> None:
    class BatchDependentBeforeTheEnd(Model):
        def forward(self, works: Any, pool: Pool, *, every: bool = False) -> Any:
            logits = super().forward(works, pool, every=every)
            if not every:
                return logits
            inside = [
                n + 1 < len(w.sequence.tokens) for w in works for n in range(w.start, w.start + w.count)
            ]
            return logits + 1e-7 * len(works) * torch.tensor(inside)[:, None]

    sociable = BatchDependentBeforeTheEnd(model.module, context_tokens=1024)
    sociable.tile = model.tile
    assert not is_exact(sociable, sociable.pool(blocks=64, block_tokens=32), Blocks(64, 32))


def test_a_machine_that_adds_differently_gets_larger_tiles(model: Model) -> None:
    class Coarse(Model):
        def forward(self, works: Any, pool: Pool, *, every: bool = False) -> Any:
            return super().forward(works, pool, every=every) + (1e-7 * len(works) if self.tile < 16 else 0.0)

    coarse = Coarse(model.module, context_tokens=1024)
    assert make_exact(coarse, coarse.pool(blocks=64, block_tokens=32), Blocks(64, 32))
    assert coarse.tile == 16


def test_an_unsupported_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16).save_pretrained(tmp_path)
    with pytest.raises(EngineDead, match="holds a gpt2 model; this engine serves llama"):
        load_model(TransformersSettings(folder=tmp_path, context_tokens=64))


def test_damaged_weights_are_refused_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:100_000])
    with pytest.raises(EngineDead, match="cannot load the model in"):
        load_model(TransformersSettings(folder=tmp_path, context_tokens=64))


def test_missing_weights_are_refused_not_made_up(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(EngineDead, match=r"lack model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(TransformersSettings(folder=tmp_path, context_tokens=64))
