"""Publishes a worker's KV cache events to routers."""
