"""One answer from its first attempt to its end, over any number of workers."""
