"""The planner as a process of its own."""
