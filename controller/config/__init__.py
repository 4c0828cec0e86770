"""Loads the settings of every role from environment variables and flags, and groups the flags."""
