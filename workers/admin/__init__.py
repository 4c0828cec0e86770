"""A worker's admin port: health, metrics, chaos."""
