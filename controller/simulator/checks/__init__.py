"""The invariants that every simulated history must satisfy."""
