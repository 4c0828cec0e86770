"""A worker's settings: their fields, and how they are loaded and checked."""
