"""The simulated supervisor that applies planners' proposals."""
