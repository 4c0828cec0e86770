"""Publishes the KV events of a worker's engine to the routers of frontends."""
