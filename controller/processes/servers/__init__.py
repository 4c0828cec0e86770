"""The broker, database and Prometheus of a fleet: embedded and supervised, or external."""
