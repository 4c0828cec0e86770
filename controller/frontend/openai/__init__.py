"""The OpenAI API without sockets: request bodies and heads, chat templates, tokenisation, response writers."""
