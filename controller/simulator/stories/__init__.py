"""Fixed scenarios, run for their transcripts."""
