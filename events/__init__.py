"""Facts, their encoding and the journal, as controllers, frontends and workers share them."""
