"""The store's fixtures: see `store_databases`."""

from store_databases import database_url as database_url
