"""Fleets in virtual time: the router's own code and the simulated engine's own scheduler, without clocks, sockets and tokens."""
