"""A frontend's end of the request plane: connections to workers, and the detector of hangs."""
