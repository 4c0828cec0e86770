"""Signs webhook requests by Standard Webhooks (standardwebhooks.com): HMAC-SHA256 in three headers.

webhook-id         the event's id: the same for every try and redelivery
webhook-timestamp  Unix seconds of this try
webhook-signature  v1,BASE64 of hmac(key, "id.timestamp.body"); one per key, separated by spaces
"""

import base64
import hashlib
import hmac
from collections.abc import Sequence


def headers(keys: Sequence[bytes], id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of one try. Without keys the request is not signed."""
    signed = f"{id}.{timestamp}.".encode() + body
    made = (base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys)
    found = {"webhook-id": id, "webhook-timestamp": str(timestamp)}
    if keys:
        found["webhook-signature"] = " ".join(f"v1,{one}" for one in made)
    return found
