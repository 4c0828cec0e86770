"""The client side of the request plane: connections to workers, and the detection of hung workers."""
