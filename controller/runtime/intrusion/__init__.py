"""Defence of a controller against compromised workers: intake of their facts, and intrusion reports."""
