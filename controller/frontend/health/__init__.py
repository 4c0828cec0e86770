"""A frontend's own view of its workers: local breakers, panic, exposure, corruption."""
