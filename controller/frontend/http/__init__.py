"""Listeners, routes and the fast path of the OpenAI API."""
