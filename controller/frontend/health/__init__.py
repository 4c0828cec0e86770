"""Worker health as seen by one frontend: local breakers, panic, exposed and poisonous requests."""
