"""A worker's settings: their fields, loading and validation."""
