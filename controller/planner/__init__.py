"""How many workers does each model need, now and soon? What is read, what is decided, and what that would have cost."""
