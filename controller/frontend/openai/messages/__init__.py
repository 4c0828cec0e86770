"""Anthropic's Messages API: the models of its bodies, their conversion to chats, and its answers."""
