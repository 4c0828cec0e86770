"""Who has which blocks: the KV indexer and what feeds it."""
