"""Moving a running request to another worker with its KV cache, or taking one in: docs/kv-transfer.md."""
