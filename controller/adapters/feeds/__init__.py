"""What a router hears besides the journal: KV events of workers, running requests of other frontends."""
