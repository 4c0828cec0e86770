"""Implements `holdfast replay`: timelines, past states, causes, reports, what-if, verify and rebuild."""
