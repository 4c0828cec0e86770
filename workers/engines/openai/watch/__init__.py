"""What a worker reads repeatedly: an upstream's API key, identity, health and retry times."""
