"""The planner loop: reads the state store, decides, and records and applies proposals."""
