"""The fixtures of the state store: see `store_databases`."""

from store_databases import database_url, empty_database_url, open_store, place_to_store, tester_url

__all__ = ["database_url", "empty_database_url", "open_store", "place_to_store", "tester_url"]
