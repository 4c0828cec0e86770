"""Moves a running request to or from another worker with its KV cache: docs/concepts/kv-transfer.md."""
