"""Serves the health and the metrics of a worker process on its admin port."""
