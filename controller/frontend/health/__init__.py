"""A frontend's own view of its workers: local breakers, panic mode, exposure and corruption."""
