"""The planner process."""
