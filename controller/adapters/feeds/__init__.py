"""Feeds the router with workers' KV events and with the running requests of other frontends."""
