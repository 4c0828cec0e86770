"""Access control of the console: the admin port's checks, and for actions the page's own token.

A request for an action must come from a page of this origin that has the token, which is drawn at random at the frontend's start.
"""

import hmac
from collections.abc import Mapping

from events.process.admin_guard import refusal

__all__ = ["TOKEN", "refusal", "refusal_to_act"]

TOKEN = "X-Holdfast-Console"


def refusal_to_act(headers: Mapping[str, str], names: frozenset[str], token: str) -> str:
    """Return why a request for an action is refused; empty if it is allowed. `names`: names of this host."""
    if why := refusal(headers, names):
        return why
    host = headers.get("Host", "")
    if headers.get("Origin", "") not in (f"http://{host}", f"https://{host}"):
        return "it does not come from this console's page: its Origin differs"
    if not hmac.compare_digest(headers.get(TOKEN, "").encode(), token.encode()):
        return f"its {TOKEN} does not match this frontend's: reload the page"
    return ""
