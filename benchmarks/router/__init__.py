"""How fast and how well requests find their caches."""
