"""Request handling under overload."""
