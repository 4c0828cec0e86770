"""Fleets in virtual time: the router's code and the simulated engine's scheduler, without sockets."""
