"""Facts, their encoding and their journal: shared by controllers, frontends and workers."""
