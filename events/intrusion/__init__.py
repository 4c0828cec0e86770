"""Detects and reports what a compromised process sends: forged sources, excessive or false messages."""
