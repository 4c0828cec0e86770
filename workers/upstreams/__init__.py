"""Many upstreams in one process: one worker for each entry of a watched file."""
