"""Which brokers does a URL name, with which account, and what of it may be shown?"""

from urllib.parse import unquote, urlsplit

from events.errors import HoldfastError

SCHEMES = ("nats", "tls", "ws", "wss")


def masked(urls: str) -> str:
    """Return brokers' URLs that may be shown: without their passwords and tokens."""
    return ",".join(_without_account(url.strip()) for url in urls.split(","))


def _without_account(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def account(urls: str) -> dict[str, str]:
    """Return the account in brokers' URLs as nats-py's options, decoded: then it holds for those members of a cluster, too,
    that the brokers tell of. nats-py would decode nothing, and know it for none but the URL's own. Of several accounts: none."""
    found = {url.strip().rpartition("://")[2].rpartition("@")[0] for url in urls.split(",")} - {""}
    if len(found) != 1:
        return {}
    user, colon, password = found.pop().partition(":")
    return {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}


class BadBrokerUrl(HoldfastError):
    """A broker's URL reads nats://host:port, or several of them with commas between."""


def check_url(urls: str) -> None:
    """Raise BadBrokerUrl unless a broker can be meant: nats-py's task would end in silence on some of the others."""
    for url in urls.split(","):
        try:
            parts = urlsplit(url.strip())
            good = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            good = False
        if not good:
            raise BadBrokerUrl(f"{masked(url)!r} is no broker's URL. {BadBrokerUrl.__doc__}")
