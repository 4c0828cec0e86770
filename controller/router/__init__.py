"""Routing: the endpoints, their cached prefixes, their load, and the choice of a worker for a request."""
