"""The invariants that every simulated history is held to."""
