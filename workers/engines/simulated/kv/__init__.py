"""The KV cache of a simulated rank: which blocks are where, and which go first."""
