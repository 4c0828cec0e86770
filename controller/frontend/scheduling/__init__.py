"""Scheduling: worker selection, first-token measurements of worker pools, and traffic reports."""
