"""Which requests the console answers: those that its port answers, and of acts only those of its own page.

What changes anything has to come from a page of this origin, which knows a word that is drawn when the frontend starts.
"""

import hmac
from collections.abc import Mapping

from events.process.admin_guard import refusal

__all__ = ["TOKEN", "refusal", "refusal_to_act"]

TOKEN = "X-Holdfast-Console"


def refusal_to_act(headers: Mapping[str, str], names: frozenset[str], token: str) -> str:
    """Return why a request that changes something is refused; empty: it is not. `names`: this host's own."""
    if why := refusal(headers, names):
        return why
    host = headers.get("Host", "")
    if headers.get("Origin", "") not in (f"http://{host}", f"https://{host}"):
        return "it does not come from this console's page: its Origin is another one"
    if not hmac.compare_digest(headers.get(TOKEN, "").encode(), token.encode()):
        return f"its {TOKEN} is not this frontend's: load the page again"
    return ""
