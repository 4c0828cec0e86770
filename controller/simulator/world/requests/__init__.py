"""The simulated frontends, and the requests that they send to workers."""
