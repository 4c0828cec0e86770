"""Grammars of structured output: parsers, a recogniser, residuals, and a token matcher, without I/O.

When a request with structured output moves, the new worker gets a grammar of exactly what may still follow. So the move does
not change which answers are possible.
"""
