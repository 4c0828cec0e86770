"""Dynamo's side of `benchmarks.router.index`, run by Dynamo's Python: its binding's radix tree."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.router.index_workload import Chain, run


class Dynamo:
    """The binding accepts events as JSON, and looks up local hashes; an engine's own block names are arbitrary."""

    def __init__(self) -> None:
        from dynamo.llm import RadixTree, compute_block_hash_for_seq

        self._tree, self._hash = RadixTree(), compute_block_hash_for_seq

    def ready(self, chain: Chain) -> tuple[bytes, Chain]:
        blocks = [{"block_hash": block, "tokens_hash": block} for block in chain]
        event = {"event_id": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
        return json.dumps(event).encode(), chain

    def store(self, worker: int, announced: bytes) -> None:
        self._tree.apply_event(worker, announced)

    def find(self, asked: Chain) -> int:
        return len(self._tree.find_matches(asked).scores)

    def hash(self, tokens: Sequence[int], block_tokens: int) -> Any:
        return self._hash(tokens, block_tokens)


if __name__ == "__main__":
    sys.exit(run(Dynamo))
