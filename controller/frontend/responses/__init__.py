"""From a worker's tokens to what the client reads: SSE events and whole answers."""
