"""Live requests: dispatch, placement, preemption and accounting."""
