"""Votes on the answers to canaries: which agree, and which are enough."""
