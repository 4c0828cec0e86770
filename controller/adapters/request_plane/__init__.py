"""The frontend's side of the request plane: connections to workers, and hang detection."""
