"""Moves running requests between workers with their KV cache: docs/concepts/kv-transfer.md."""
