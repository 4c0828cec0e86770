"""`holdfast replay`: timelines, past states, causes, reports, what-if, verification and rebuilds."""
