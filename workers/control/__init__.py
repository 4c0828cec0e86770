"""What the controller asks of a worker, and what it hears from it."""
