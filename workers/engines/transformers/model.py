"""The forward pass of a Llama-family model over the tokens of one engine step.

The weights are in Hugging Face's modules (`loading.py`). The forward pass is Holdfast's own, because Holdfast must control the
KV cache. Requests join and leave the batch at any step, KV blocks move to other workers, and faults are injected into named
weights.

The weights of the Q, K and V projections are fused into one matrix, and those of the gate and up projections into another. The
modules' parameters are views of the fused matrices, so that a fault in a named parameter affects the computation.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Sequential
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from events.wire import Sampling
from workers.engines.transformers.attention import Pool, Span, attend, banded, span
from workers.engines.transformers.blocks import Blocks
from workers.engines.transformers.sequence import SequenceWork, TorchSequence

HfModule = Any
"""A module or configuration of Hugging Face; its attributes depend on the family."""

# the number of rows of a matrix product is a multiple of the first of these that is exact, see attention.py
TILES = (4, 8, 16)

_PROMPT = 80  # tokens of a prompt of the exactness check
_PIECES = [37, 1, 1, 2, 16, 1, 21, 1]  # lengths of its pieces, which add up to _PROMPT
_OTHERS = 3  # number of other sequences in the batch of the check
_ROUNDS = 6  # number of prompts; one is too few, because rounding to 16 bits hides most differences


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer, partly fused. A bias or norm is None if the model has none."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    act: HfModule


Prompt = tuple[int, int, list[int], Tensor]
"""First row, number of rows, block table, position of each query row."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step, prepared once for all layers. Each row is one token of a sequence, or padding."""

    cos: Tensor  # rotary embedding of each row's position
    sin: Tensor
    blocks: Tensor  # KV block into which each row's keys and values are written
    offsets: Tensor  # index of each row's token in the block
    decoding: int  # number of decoding sequences; their rows come first, one row each
    over: Span | None  # the blocks that the decoding sequences read; None: there are no such sequences
    prompts: list[Prompt]  # the sequences with several rows


class Model:
    """A loaded model. It is not thread-safe, because only the engine's thread computes with it."""

    def __init__(self, module: HfModule, *, context_tokens: int) -> None:
        config = module.config
        self.module = module
        self.tile = TILES[0]
        self.config = config
        self.vocabulary = int(config.vocab_size)
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        self.width = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.context_tokens = _context(config, context_tokens)
        self._eps = float(config.rms_norm_eps)
        self._embed = _aligned(module.model.embed_tokens)
        self._norm = module.model.norm.weight
        self._head = _aligned(module.lm_head)
        self._layers = [_layer(layer) for layer in module.model.layers]
        self.device: torch.device = self._embed.device
        self.dtype: torch.dtype = self._embed.dtype
        self._cos, self._sin = _rotations(module, self.context_tokens, self._embed)

    def pool(self, *, blocks: int, block_tokens: int) -> Pool:
        """Return an empty KV cache for this model."""
        return Pool(
            layers=len(self._layers), blocks=blocks, kv_heads=self.kv_heads, block_tokens=block_tokens,
            width=self.width, dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by their names in the model's files."""
        return {name: parameter.data for name, parameter in self.module.named_parameters()}

    @torch.inference_mode()
    def forward(self, works: Sequential[SequenceWork], pool: Pool, *, every: bool = False) -> Tensor:
        """Compute one step, store the tokens' keys and values in the pool, and return float32 logits.

        `works` are the parts of the step, one per sequence. Parts with a single token must come first. The result has one row for
        each sequence that gets a next token, in order, or one row for every token if `every` is set.
        """
        x = self.hidden(works, pool)
        count = sum(work.count for work in works)
        return self.logits(x, list(range(count)) if every else sampling_rows(works))

    @torch.inference_mode()
    def hidden(self, works: Sequential[SequenceWork], pool: Pool) -> Tensor:
        """Compute one step, store the tokens' keys and values in the pool, and return the hidden states of the last layer.

        `works` are the parts of the step, one per sequence. Parts with a single token must come first. The result has one row per
        token, in order, and then rows of padding.
        """
        tokens = [
            token for work in works for token in work.sequence.tokens[work.start : work.start + work.count]
        ]
        padding = -len(tokens) % self.tile
        rows = self._rows(works, pool, padding)
        x = self._embed[torch.tensor(tokens + [0] * padding, device=self.device)]
        for number, layer in enumerate(self._layers):
            x = self._pass(x, layer, rows, pool.keys[number], pool.values[number])
        return x

    def _pass(self, x: Tensor, layer: Layer, rows: Rows, keys: Tensor, values: Tensor) -> Tensor:
        h = functional.rms_norm(x, x.shape[-1:], layer.norm, self._eps)
        qkv = functional.linear(h, layer.qkv, layer.qkv_bias).view(len(x), -1, self.width)
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = functional.rms_norm(q, (self.width,), layer.q_norm, self._eps)
            k = functional.rms_norm(k, (self.width,), layer.k_norm, self._eps)
        q = _rotate(q, rows.cos, rows.sin) * self.width**-0.5
        keys[rows.blocks, :, rows.offsets] = _rotate(k, rows.cos, rows.sin)
        values[rows.blocks, :, rows.offsets] = v
        attended = self._attention(q, keys, values, rows)
        x = x + functional.linear(attended, layer.out, layer.out_bias)
        h = functional.rms_norm(x, x.shape[-1:], layer.mlp_norm, self._eps)
        gate, up = functional.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return x + functional.linear(layer.act(gate) * up, layer.down, layer.down_bias)

    def _attention(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
        group = self.heads // self.kv_heads
        answer = torch.zeros_like(q)
        if rows.over is not None:
            queries = q[: rows.decoding].reshape(rows.decoding, self.kv_heads, group, self.width)
            padded = functional.pad(queries, (0, 0, 0, -group % self.tile))
            attended = attend(padded, keys, values, rows.over)[:, :, :group]
            answer[: rows.decoding] = attended.reshape(rows.decoding, self.heads, self.width)
        for first, count, table, places in rows.prompts:
            part = q[first : first + count].view(count, self.kv_heads, group, self.width)
            queries = part.permute(1, 0, 2, 3).reshape(self.kv_heads, count * group, self.width)
            padded = functional.pad(queries, (0, 0, 0, len(places) - count * group))
            attended = banded(padded, keys, values, table, places, self.tile)[:, : count * group]
            attended = attended.view(self.kv_heads, count, group, self.width).permute(1, 0, 2, 3)
            answer[first : first + count] = attended.reshape(count, self.heads, self.width)
        return answer.flatten(1)

    @torch.inference_mode()
    def logits(self, x: Tensor, wanted: list[int]) -> Tensor:
        """Return float32 logits for the rows `wanted` of the hidden states `x`, which `hidden` has returned."""
        padded = wanted + wanted[-1:] * (-len(wanted) % self.tile)
        if not padded:
            return torch.empty((0, self.vocabulary), device=self.device)
        x = functional.rms_norm(x[padded], x.shape[-1:], self._norm, self._eps)
        return functional.linear(x, self._head)[: len(wanted)].float()

    def _rows(self, works: Sequential[SequenceWork], pool: Pool, padding: int) -> Rows:
        places: list[int] = []
        blocks: list[int] = []
        for work in works:
            span_ = range(work.start, work.start + work.count)
            places += span_
            blocks += [work.sequence.blocks[place // pool.block_tokens] for place in span_]
        blocks += [pool.sink] * padding
        at = torch.tensor(places + [0] * padding, device=self.device)
        decoding = sum(1 for work in works if work.count == 1)
        return Rows(
            cos=self._cos[at][:, None],
            sin=self._sin[at][:, None],
            blocks=torch.tensor(blocks, device=self.device),
            offsets=at % pool.block_tokens,
            decoding=decoding,
            over=self._decode_span(works[:decoding], pool) if decoding else None,
            prompts=self._prompts(works[decoding:], decoding, pool),
        )

    def _decode_span(self, works: Sequential[SequenceWork], pool: Pool) -> Span:
        size = pool.block_tokens
        tables = [work.sequence.blocks[: work.start // size + 1] for work in works]
        seen = [
            work.start + 1 - n * size for work, t in zip(works, tables, strict=True) for n in range(len(t))
        ]
        within = torch.arange(size, device=self.device)
        hidden = within[None, None] >= torch.tensor(seen, device=self.device)[:, None, None]
        return span(tables, hidden, self.device)

    def _prompts(self, works: Sequential[SequenceWork], first: int, pool: Pool) -> list[Prompt]:
        group = self.heads // self.kv_heads
        found = []
        for work in works:
            end = work.start + work.count
            table = work.sequence.blocks[: -(-end // pool.block_tokens)]
            places = torch.arange(work.start, end, device=self.device).repeat_interleave(group)
            places = functional.pad(places, (0, -len(places) % self.tile), value=work.start)
            found.append((first, work.count, table, places))
            first += work.count
        return found


def _context(config: HfModule, wanted: int) -> int:
    limits = [wanted, int(config.max_position_embeddings)]
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        limits.append(int(window))  # up to the window's length, sliding attention equals full attention
    return min(limits)


def _rotations(module: HfModule, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.arange(tokens, device=like.device)[None]
    cos, sin = module.model.rotary_emb(like, places)
    return cos[0].clone(), sin[0].clone()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def sampling_rows(works: Sequential[SequenceWork]) -> list[int]:
    """Return the indexes of the rows from which the step's next tokens are chosen.

    A step has one row per token. For each sequence that gets a next token, the result has the row of the sequence's last token.
    """
    rows, end = [], 0
    for work in works:
        end += work.count
        if work.samples:
            rows.append(end - 1)
    return rows


def _layer(layer: HfModule) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
    return Layer(
        norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        out=_aligned(attention.o_proj),
        out_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=_aligned(mlp.down_proj),
        down_bias=mlp.down_proj.bias,
        act=mlp.act_fn,
    )


def _fuse(*linears: HfModule) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights and biases of linear modules, and make the modules' parameters views of the result.

    Return the weight and the bias; the bias is None if the modules have none.
    """
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.data for linear in linears])
    start = 0
    for linear in linears:
        end = start + linear.weight.shape[0]
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias


def _aligned(module: HfModule) -> Tensor:
    """Return a module's weight, moved to a 64-byte aligned address if necessary.

    A library may choose its kernel by the alignment, and other kernels may give other results.
    """
    weight: Tensor = module.weight
    if weight.data_ptr() % 64:
        weight.data = weight.data.clone()
    return weight


# a function that sets the model's tile, and returns whether the model is exact with this tile
Check = Callable[[Model, Pool, Blocks], bool]


def make_exact(model: Model, pool: Pool, blocks: Blocks) -> bool:
    """Set the smallest tile of rows with which the model is exact on this machine.

    A model is exact if its logits do not depend on the rest of the batch or on the chunks of a prompt. With a tile of n, each
    matrix product gets padding rows up to a multiple of n rows. Return False if the model is exact with none of the tiles. The
    order of additions in the installed libraries can differ between processors, see attention.py. Therefore the model itself is
    checked at the engine's start. The check computes a prompt at once, and again in uneven pieces with other sequences in the
    batch, and compares the logits bit by bit. It takes a few steps and covers every matrix of the model.
    """
    for model.tile in TILES:
        if is_exact(model, pool, blocks):
            return True
    model.tile = TILES[0]
    return False


def is_exact(model: Model, pool: Pool, blocks: Blocks) -> bool:
    """Return whether test prompts get bit-identical logits when computed at once, and in pieces within a batch.

    All blocks that the check allocates are released.
    """
    return all(_reads_alike(model, pool, blocks, random.Random(seed)) for seed in range(_ROUNDS))


def _reads_alike(model: Model, pool: Pool, blocks: Blocks, draw: random.Random) -> bool:
    length = min(
        _PROMPT, model.context_tokens - 2, (blocks.count * blocks.tokens) // (_OTHERS + 2) - blocks.tokens
    )
    if length < _PROMPT:
        return False  # the context or the pool is too small for the check, which only happens in tests
    reader = _Reader(model, pool, blocks)
    tokens = [draw.randrange(model.vocabulary) for _ in range(length)]
    whole, pieces = _sequence(tokens), _sequence(tokens)
    others = [
        _sequence([draw.randrange(model.vocabulary) for _ in range(9 + 11 * n)]) for n in range(_OTHERS)
    ]
    try:
        expected = reader.read([(whole, length)])[whole]
        reader.read([(other, 8) for other in others])
        for part in torch.split(expected, _PIECES):
            company = [(other, 1) for other in others if other.uncached]
            if not torch.equal(part, reader.read([(pieces, len(part)), *company])[pieces]):
                return False
        return True
    finally:
        for sequence in (whole, pieces, *others):
            blocks.give_back(sequence.blocks)


class _Reader:
    def __init__(self, model: Model, pool: Pool, blocks: Blocks) -> None:
        self._model, self._pool, self._blocks = model, pool, blocks

    def read(self, parts: list[tuple[TorchSequence, int]]) -> dict[TorchSequence, torch.Tensor]:
        """Run some tokens of each sequence through the model in one step. Return the logits of these tokens by sequence.

        `parts` lists the sequences, each with the number of tokens to run.
        """
        works = []
        for sequence, count in parts:
            while len(sequence.blocks) < self._blocks.needed(sequence.cached + count):
                sequence.blocks.append(self._blocks.take())
                self._pool.clear(sequence.blocks[-1:])
            works.append(SequenceWork(sequence, sequence.cached, count))
        works.sort(key=lambda work: work.count > 1)
        logits = self._model.forward(works, self._pool, every=True)
        for work in works:
            work.sequence.cached += work.count
        read = torch.split(logits, [work.count for work in works])
        return {work.sequence: rows for work, rows in zip(works, read, strict=True)}


def _sequence(tokens: list[int]) -> TorchSequence:
    return TorchSequence(0, tokens, len(tokens), Sampling(max_tokens=1), 0)
