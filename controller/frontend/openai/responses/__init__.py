"""OpenAI's Responses API: bodies and their conversion to chats, answers, stored responses."""
