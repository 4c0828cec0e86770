"""The processes of a fleet: each module composes one role from the parts. Only `cli` starts them."""
