"""Derives the state store's rows from fleet state and events, and compares them with stored rows."""
