"""The router's feeds besides the journal: KV events of workers, running requests of other frontends."""
