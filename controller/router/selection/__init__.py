"""The choice of a worker: filter, score, pick."""
