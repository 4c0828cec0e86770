"""Parses a model's output text into content, reasoning and tool calls, incrementally. Pure."""
