"""What canaries catch of silent data corruption."""
