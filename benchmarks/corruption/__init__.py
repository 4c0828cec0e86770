"""Detection of silent data corruption by canaries."""
