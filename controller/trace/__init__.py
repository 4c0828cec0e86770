"""Traces of recorded requests: statistics, profiles, synthesis of similar requests, and replay."""
