"""Recorded requests: statistics, profiles, and synthesis of new requests like them."""
