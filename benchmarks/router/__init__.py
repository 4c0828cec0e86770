"""Speed and quality of KV-aware routing."""
