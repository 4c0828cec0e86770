"""Stores the state of the fleet and all events in Postgres, and migrates the database."""
