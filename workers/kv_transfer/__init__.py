"""Transfers a running request's KV cache between two worker processes: docs/concepts/kv-transfer.md."""
