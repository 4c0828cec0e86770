"""Votes on the answers to canaries: grouping equal answers, and counting a quorum."""
