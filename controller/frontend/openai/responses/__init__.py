"""OpenAI's Responses API: the models of its bodies, their conversion to chats, its answers and stored responses."""
