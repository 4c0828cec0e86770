"""The parts of a worker's server: who is connected, what is refused, what the engine says, and the signs of life."""
