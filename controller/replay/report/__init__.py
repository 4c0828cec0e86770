"""Implements `holdfast replay report`, which writes a post-mortem as HTML, Markdown or JSON."""
