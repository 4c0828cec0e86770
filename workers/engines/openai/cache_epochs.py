"""Salts that keep requests away from spoilt blocks in an upstream's prefix cache.

That cache cannot be emptied from here. A request may only reuse what was computed since the last conviction of this worker, in
whichever of its instances: each epoch has its own salt. While the worker is distrusted and no later epoch has begun, a request
reuses nothing and leaves nothing.
"""

import secrets

import msgspec

from events.wire import Generate
from workers.engines.openai.kv_names import CANARY_SALT, salt_of


class CacheEpochs:
    """The epochs of one upstream's prefix cache."""

    def __init__(self) -> None:
        self._trusted = True
        self._epoch = 0  # the last epoch seen
        self._spoilt = -1  # the last epoch that may contain wrong blocks

    def trust(self, trusted: bool) -> None:
        """Stop the reuse of everything computed so far. Until trusted again, requests leave nothing, like canaries."""
        self._trusted = trusted
        if not trusted:
            self._spoilt = self._epoch

    def salted(self, request: Generate) -> Generate:
        """Return a request with the salt of its epoch. Canaries already have one."""
        if request.canary:
            return request
        self._epoch = max(self._epoch, request.cache_epoch)
        apart = not self._trusted or self._epoch <= self._spoilt
        salt = CANARY_SALT + secrets.token_hex(16) if apart else salt_of(self._epoch, request.cache_salt)
        return msgspec.structs.replace(request, cache_salt=salt)
