"""What a simulated fleet consists of: time, broker, machines, frontends, controllers, faults."""
