"""Requests on their way, and the frontends that send them."""
