"""Histories that are told in one way only, for their transcripts."""
