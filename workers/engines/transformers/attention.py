"""Attention over a paged KV cache, with results that do not depend on the rest of the batch.

When the shape of a matrix product changes, a library can add the terms in another order. Because float addition is not
associative, the result then differs in the last bits, and occasionally in a token. A prompt would therefore have different
results alone, in a batch or in other chunks. To prevent this, every sum in this module has a fixed shape and order:

    scores   q · kᵀ   over the head's width                 one product per (block, KV head): always the same depth
    weights  p · v    over the tokens of one block          one product per (block, KV head): always the same depth
    answer            over the blocks of a sequence         added one by one, in the order of positions

Measured on CPU (MKL, fp32 and bf16, 1 to 4 threads): rows of such products are bit-identical for every number of rows that is a
multiple of four, and for every number of products in one call. With one to three rows, the library runs another kernel. So rows
are computed in tiles of four, padded if necessary. Masked values are exactly zero and change no sum. `make_exact` checks all this
at the engine's start on the machine itself. It tries larger tiles if tiles of four rows are not exact.

The blocks in use are close together, because the lowest free block is taken first. So attention can read a whole slice of the
pool without copying it. The blocks are gathered into a copy in two cases only: most of the slice belongs to other requests, or
sequences of the call share blocks.
"""

from collections.abc import Sequence as Sequential
from dataclasses import dataclass

import torch
from torch import Tensor

# numbers in one score tensor; longer prompts are split into bands of rows
SCRATCH_FLOATS_MAX = 16 * 1024 * 1024
_SPARSE = 3  # gather the blocks if the slice that contains them has more than this many times as many blocks


class Pool:
    """The keys and values of all KV blocks: tensors of shape [layer, block, KV head, token in block, head width].

    The keys and values of padding rows are written to an additional last block, `sink`, which is never read.
    """

    def __init__(
        self, *, layers: int, blocks: int, kv_heads: int, block_tokens: int, width: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (layers, blocks + 1, kv_heads, block_tokens, width)
        # The memory is not zeroed here, because each block is cleared when it is allocated. So unused memory is never touched.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.block_tokens = block_tokens
        self.sink = blocks
        # CUDA event of the last clearing of blocks; None on the CPU
        self.cleared = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def clear(self, blocks: Sequential[int]) -> None:
        """Set these blocks to zero, because zero times NaN is NaN: a mask would not hide a NaN in unused memory."""
        if blocks:
            index = torch.tensor(sorted(set(blocks)), device=self.keys.device)
            self.keys[:, index] = 0
            self.values[:, index] = 0
            if self.cleared is not None:
                self.cleared.record()

    def clear_end(self, block: int, first: int) -> None:
        """Set a block's tokens from index `first` on to zero, because a block from another worker may contain NaN there."""
        self.keys[:, block, :, first:] = 0
        self.values[:, block, :, first:] = 0


@dataclass(frozen=True, slots=True)
class Span:
    """The KV blocks that one attention call reads, for each of the call's sequences.

    In the fields, an item is one sequence with its query rows. A span of decoding sequences is built once per step and used
    in every layer.
    """

    items: int  # number of items
    # the pool's blocks that are read: a slice, or an index tensor if they are gathered
    picked: slice | Tensor
    query_of: Tensor  # for each picked block, the item that its queries come from
    hidden: Tensor  # [picked, item rows or 1, block tokens]: True where attention is masked
    order: Tensor  # indexes into the picked blocks, item by item, in order of position
    owner: Tensor  # for each entry of `order`, the item of that block


def span(tables: Sequential[Sequential[int]], hidden: Tensor, device: torch.device) -> Span:
    """Return the `Span` for one attention call.

    Args:
        tables: the list of blocks of each item (sequence).
        hidden: a mask of shape [block, row, block tokens], over the blocks of all items in order; True: attention is masked.
            The row axis has size 1 if one mask applies to all query rows.
        device: where the tensors of the result are.
    """
    blocks = [block for table in tables for block in table]
    owner = torch.tensor([item for item, table in enumerate(tables) for _ in table], device=device)
    low, high = min(blocks), max(blocks) + 1
    shared = len(set(blocks)) < len(blocks)  # a block in a slice has room for the query of one item only
    if shared or high - low > _SPARSE * len(blocks):
        everything = torch.arange(len(blocks), device=device)
        return Span(len(tables), torch.tensor(blocks, device=device), owner, hidden, everything, owner)
    order = torch.tensor(blocks, device=device) - low
    query_of = torch.zeros(high - low, dtype=torch.long, device=device)
    query_of[order] = owner
    spread = torch.ones((high - low, *hidden.shape[1:]), dtype=torch.bool, device=device)
    spread[order] = hidden
    return Span(len(tables), slice(low, high), query_of, spread, order, owner)


def attend(queries: Tensor, keys: Tensor, values: Tensor, over: Span) -> Tensor:
    """Return softmax(queries · keysᵀ) · values for each item (sequence), in the shape of `queries`.

    `queries` is [item, KV head, row, width]. The queries are already scaled. The number of rows is a multiple of the model's tile
    size (4, 8 or 16). `keys` and `values` are one layer of the pool, and `over` tells which KV blocks each item reads.
    """
    items, heads, rows, width = queries.shape
    keys, values = keys[over.picked], values[over.picked]
    picked, _, tokens, _ = keys.shape
    spread_queries = queries[over.query_of] if items > 1 else queries.expand(picked, -1, -1, -1)
    scores = torch.bmm(
        spread_queries.reshape(-1, rows, width), keys.reshape(-1, tokens, width).transpose(1, 2)
    )
    scores = scores.view(picked, heads, rows, tokens).float()
    scores.masked_fill_(over.hidden[:, None], -torch.inf)
    highest = _highest(scores.amax(dim=-1), over)
    weights = scores.sub_(highest[over.query_of][..., None]).exp_()
    parts = torch.bmm(weights.view(-1, rows, tokens).to(values.dtype), values.reshape(-1, tokens, width))
    parts = parts.view(picked, heads, rows, width).float()
    total = _added(weights.sum(dim=-1, keepdim=True), over)
    return (_added(parts, over) / total).to(queries.dtype)


def banded(
    queries: Tensor, keys: Tensor, values: Tensor, table: Sequential[int], first: Tensor, tile: int
) -> Tensor:
    """Return the attention of one sequence with many query rows, one band of rows at a time to save memory.

    `queries` is [KV head, row, width], and the number of rows is a multiple of `tile`. `keys` and `values` are one layer of the
    pool. `table` lists the sequence's blocks. `first` has the position of each row's token. A row attends to all tokens up to and
    including that position.
    """
    heads, rows, _ = queries.shape
    tokens = keys.shape[2]
    room = SCRATCH_FLOATS_MAX // (len(table) * heads * tokens)
    band = max(tile, room // tile * tile)
    places = torch.arange(len(table) * tokens, device=queries.device).view(len(table), 1, tokens)
    answers = []
    for start in range(0, rows, band):
        hidden = places > first[None, start : start + band, None]
        over = span([table], hidden, queries.device)
        answers.append(attend(queries[None, :, start : start + band], keys, values, over)[0])
    return answers[0] if len(answers) == 1 else torch.cat(answers, dim=1)


def _highest(blocks: Tensor, over: Span) -> Tensor:
    """Return, for each item (sequence), the elementwise maximum over the item's KV blocks.

    `blocks` has one entry for each KV block that the attention call reads, along its first axis. The order of the blocks does not
    affect the result.
    """
    if over.items == 1:
        return blocks[over.order].amax(dim=0, keepdim=True)
    index = over.owner.view(-1, 1, 1).expand(-1, *blocks.shape[1:])
    start = torch.full((over.items, *blocks.shape[1:]), -torch.inf, device=blocks.device)
    return start.scatter_reduce_(0, index, blocks[over.order], reduce="amax")


def _added(blocks: Tensor, over: Span) -> Tensor:
    """Return, for each item (sequence), the elementwise sum over the item's KV blocks.

    `blocks` has one entry for each KV block that the attention call reads, along its first axis. The entries of an item are added
    in the order of positions.
    """
    start = torch.zeros((over.items, *blocks.shape[1:]), dtype=blocks.dtype, device=blocks.device)
    return start.index_add_(0, over.owner, blocks[over.order])
