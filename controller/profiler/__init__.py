"""`holdfast profile`: measures a running engine's speed, and writes a profile for simulated engines."""
