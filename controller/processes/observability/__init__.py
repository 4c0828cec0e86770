"""Who measures a fleet, and where he finds what to measure."""
