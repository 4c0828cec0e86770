"""Readiness of a fleet that `holdfast up` starts: when it serves, and which workers are still missing."""
