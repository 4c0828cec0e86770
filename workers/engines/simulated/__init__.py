"""The simulated engine, which has no model. Its batching and timing are realistic.

Each token depends on all tokens before it, so that a lost token changes the rest of the answer.
"""
