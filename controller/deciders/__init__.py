"""The functional core: what to do about the facts, and nothing about doing it."""
