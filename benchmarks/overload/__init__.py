"""What becomes of requests when more come than there is room for."""
