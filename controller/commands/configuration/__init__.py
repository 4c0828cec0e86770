"""Reads the configuration file, and generates its commented template and its JSON Schema."""
