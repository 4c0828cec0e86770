"""Live requests: how they are sent, placed, put off and counted."""
