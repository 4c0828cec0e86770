"""Detects and reports forged sources, floods and false messages of a compromised process."""
