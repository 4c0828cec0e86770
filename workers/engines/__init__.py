"""The `Engine` protocol and its three implementations: simulated, transformers and openai."""
