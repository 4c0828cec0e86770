"""How a fleet's supervisor handles losses: missing tables, and a missing or different journal."""
