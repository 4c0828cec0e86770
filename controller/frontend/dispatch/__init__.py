"""Requests in progress: dispatch to workers, placement, preemption and accounting."""
