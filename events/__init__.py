"""The facts of a fleet, their encoding and the journal. Controllers, frontends and workers share them."""
