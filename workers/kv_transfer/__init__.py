"""Moves the KV cache of a running request from one worker process to another: docs/concepts/kv-transfer.md."""
