"""Settings of every role: sections, environment variables and flags."""
