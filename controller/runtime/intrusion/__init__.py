"""Defence of one controller against compromised workers: the intake of their facts, and reports."""
