"""Defines, loads and validates the settings of a worker process."""
