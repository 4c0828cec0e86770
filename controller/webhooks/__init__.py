"""Webhooks: what happens in a fleet, told to URLs that its people name."""
