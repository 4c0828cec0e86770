"""The journal, the state store, and the fold between them."""
