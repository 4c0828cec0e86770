"""What happened, how it is ordered and kept: shared by both sides."""
