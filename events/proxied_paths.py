"""The HTTP paths of an inference server to which frontends pass clients' requests on.

Paths that change a server or reveal its state (sleep, adapters, caches, metrics) are not among them.
"""

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
BATCHES = "/v1/chat/completions/batch"
"""Several chats with one response, which is not streamed."""
AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Paths with multipart bodies. All other paths have JSON bodies."""
EMBEDDINGS = "/v1/embeddings"
POOLING = (
    EMBEDDINGS, "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
"""Paths with answers that are computed from the prompt alone, without generated tokens."""
PATHS = (CHATS, COMPLETIONS, MESSAGES, BATCHES, *POOLING, *AUDIO)
