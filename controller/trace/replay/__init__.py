"""`holdfast trace replay`: sends a trace's requests to an endpoint at the trace's own times."""
