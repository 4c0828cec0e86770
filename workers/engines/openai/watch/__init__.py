"""Watches the changing state of an upstream: API key, identity, health and retry times."""
