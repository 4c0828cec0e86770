"""The front door: the OpenAI API, admission, scheduling, and requests that survive their workers."""
