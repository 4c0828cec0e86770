"""Settings of every role: sections, environment variables, flags."""
