"""The planner: computes how many workers each model needs, now and soon, and simulates past days."""
