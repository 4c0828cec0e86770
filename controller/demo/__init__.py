"""The rehearsal that anyone can watch: a fleet under load, broken in every way we know."""
