"""The parts of a simulated fleet: virtual time, broker, machines, frontends, controllers and faults."""
