"""Recognition and reports of what a compromised process sends: budgets, sources, control messages."""
