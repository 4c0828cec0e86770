"""Load per worker and rank: running requests, predictions and limits."""
