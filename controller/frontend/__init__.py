"""The frontend: the OpenAI API, admission, scheduling, and requests that survive worker failures."""
