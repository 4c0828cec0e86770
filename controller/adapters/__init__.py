"""The world behind the ports: databases, brokers, connections to workers, clocks."""
