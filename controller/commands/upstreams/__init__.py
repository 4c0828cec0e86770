"""`holdfast upstream` and `holdfast reload`: the upstreams of a running fleet."""
