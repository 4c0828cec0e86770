"""Who may ask the console? Nobody by way of somebody else's browser.

Pages of other origins can send requests here from the browser of whoever looks at them. Their scripts cannot read what is
answered, unless a name of theirs is made to lead here (DNS rebinding): so the console answers to addresses, `localhost` and
this host's own name alone. What changes anything also has to come from a page of this origin, which knows a word that is drawn
when the frontend starts.
"""

import hmac
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from controller.frontend.errors import quoted

TOKEN = "X-Holdfast-Console"
OWN_SITES = ("same-origin", "none")  # none: typed, or a bookmark


def refusal(headers: Mapping[str, str], names: frozenset[str]) -> str:
    """Return why a request is not answered; empty: it is. `names`: this host's own."""
    host = headers.get("Host", "")
    if not _ours(host, names):
        return f"this console answers to addresses, localhost and {', '.join(sorted(names))}, not to {quoted(host)}"
    if headers.get("Sec-Fetch-Site", "none") not in OWN_SITES:
        return "a page of another origin has asked for it"
    return ""


def refusal_to_act(headers: Mapping[str, str], names: frozenset[str], token: str) -> str:
    """Return why a request that changes something is not heeded; empty: it is."""
    if why := refusal(headers, names):
        return why
    if headers.get("Origin", "") != f"http://{headers.get('Host', '')}":
        return "it does not come from this console's page: its Origin is another one"
    if not hmac.compare_digest(headers.get(TOKEN, "").encode(), token.encode()):
        return f"its {TOKEN} is not this frontend's: load the page again"
    return ""


def _ours(host: str, names: frozenset[str]) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in names or name == "localhost":
        return True
    try:
        return bool(ip_address(name))
    except ValueError:
        return False
