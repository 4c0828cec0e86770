"""What a worker reads of its upstream again and again: its API key, its identity, when it takes requests again."""
