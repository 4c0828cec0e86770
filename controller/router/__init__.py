"""Routing: the endpoints, what they have cached, their load, and the choice of a worker for a request."""
