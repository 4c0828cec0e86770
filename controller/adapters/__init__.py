"""Implementations of the controller's ports: database, broker, worker connections, clocks, scaling."""
