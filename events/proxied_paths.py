"""The HTTP paths of an inference server to which a frontend passes clients' requests on, with their media types.

Paths that change a server or reveal its state (sleep, adapters, caches, metrics) are not among them.
"""

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Paths with multipart bodies. All other paths have JSON bodies."""
EMBEDDINGS = "/v1/embeddings"
POOLING = (
    EMBEDDINGS, "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
"""Paths whose answers are computed from the prompt alone, without generated tokens."""
PATHS = (CHATS, COMPLETIONS, MESSAGES, *POOLING, *AUDIO)
