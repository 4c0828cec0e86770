"""Adapters of the ports: databases, brokers, connections to workers, clocks."""
