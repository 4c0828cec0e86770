"""How many requests per second can a worker serve within its SLO? Pure functions of a registered profile."""
