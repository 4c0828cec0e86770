"""A worker's admin port: health and metrics."""
