"""Filter, score, pick."""
