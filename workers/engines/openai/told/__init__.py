"""What a server reports about itself besides its model and version."""
