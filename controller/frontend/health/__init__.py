"""Worker health as one frontend sees it: local breakers, panic, exposure, poison requests."""
