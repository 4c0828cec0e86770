"""What a person types to a fleet that runs: one module a command or a family of them."""
