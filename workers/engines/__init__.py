"""The Engine protocol and the engines: simulated, transformers, openai."""
