"""`holdfast profile`: measures the speed of a running engine and writes a profile for simulated ones."""
