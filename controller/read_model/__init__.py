"""The rows of the state store: derives them from the fold and from events, and compares them."""
