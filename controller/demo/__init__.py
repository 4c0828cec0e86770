"""The demo: runs a fleet under load, and injects faults by a script."""
