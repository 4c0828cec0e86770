"""Requests in flight, and the frontends that send them."""
