"""Request migration: cost models, links, placement and the move itself, as pure functions."""
