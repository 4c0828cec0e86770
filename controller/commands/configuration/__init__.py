"""The configuration file: reads it, and generates its commented template and its JSON Schema."""
