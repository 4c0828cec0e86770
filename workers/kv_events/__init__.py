"""What a worker tells routers of its KV blocks."""
