"""The parts of a simulated fleet: time, broker, machines, frontends, controllers, faults."""
