"""What may a request find in the upstream's prefix cache, which we cannot empty?

Only what was computed since the last conviction of this worker, whichever life of it that was: each epoch has a salt of its
own. While we are distrusted, and where no later epoch has begun, a request finds and leaves nothing.
"""

import secrets

import msgspec

from events.wire import Generate
from workers.engines.openai.kv_names import CANARY_SALT, salt_of


class CacheEpochs:
    """The epochs of one upstream's prefix cache."""

    def __init__(self) -> None:
        self._trusted = True
        self._epoch = 0  # the last that was named
        self._spoilt = -1  # the last in which wrong blocks may be

    def trust(self, trusted: bool) -> None:
        """Have no request find what was computed up to now, nor, until it is trusted, leave anything, as canaries do."""
        self._trusted = trusted
        if not trusted:
            self._spoilt = self._epoch

    def salted(self, request: Generate) -> Generate:
        """Return a request with the salt of what it may find. Canaries have one already."""
        if request.canary:
            return request
        self._epoch = max(self._epoch, request.cache_epoch)
        apart = not self._trusted or self._epoch <= self._spoilt
        salt = CANARY_SALT + secrets.token_hex(16) if apart else salt_of(self._epoch, request.cache_salt)
        return msgspec.structs.replace(request, cache_salt=salt)
