"""Webhooks: delivers a fleet's events to URLs that operators configure."""
