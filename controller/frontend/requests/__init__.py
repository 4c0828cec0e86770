"""From a body's bytes to a request that can be sent to a worker."""
