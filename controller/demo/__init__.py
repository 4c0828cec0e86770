"""The demo: a fleet under load, with a script of injected faults."""
