"""The KV indexer (which rank holds which blocks) and its event feeds."""
