"""The demo: runs a fleet under load, and injects the faults of a script."""
