"""Who has how much to do: running requests by worker and rank."""
