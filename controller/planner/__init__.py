"""The planner: computes how many workers each model needs, now and soon, and rehearses past days."""
