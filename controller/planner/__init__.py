"""Capacity and spares: empty so far."""
