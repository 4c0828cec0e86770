"""Journal, state store, and the fold between them."""
