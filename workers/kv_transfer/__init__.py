"""Moves the KV cache of a running request from one worker process to another: kv-transfer.md."""
