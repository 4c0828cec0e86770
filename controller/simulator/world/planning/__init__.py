"""Who carries out what planners propose, and what goes wrong with them."""
