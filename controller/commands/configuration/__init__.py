"""What `holdfast settings` prints besides values: a commented configuration file, and its JSON Schema."""
