"""The OpenAI API without sockets: bodies, heads, chat templates, tokenization, response writers."""
