"""Parses broker URLs: the addresses, the account, and the part that may be displayed.

    nats://USER:PASSWORD@host:4222      an account; nats://TOKEN@host:4222
    tls://host:4222?nkey=FILE           an nkey's seed
    tls://host:4222?creds=FILE          a user's JWT and its seed, as `nsc` writes them
    ...&user=NAME                       our account in the broker's permissions: replies to it go to _INBOX.NAME
    nats://host:4222?keys=DIR           DIR has a seed per account: every process selects its own (`as_user`)

For several members of a cluster, separated by commas, one with credentials is enough. The scheme of the first also
applies to members without one: nats://a:4222,b:4222.
"""

from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from events.errors import HoldfastError

SCHEMES = ("nats", "tls", "ws", "wss")
NKEY, CREDS, USER, KEYS = "nkey", "creds", "user", "keys"
ASIDE = (NKEY, CREDS, USER, KEYS)  # parameters allowed in a URL's query
SUFFIX = ".nk"
INBOX = "_INBOX"


def masked(urls: str) -> str:
    """Return brokers' URLs in a form that may be displayed: without passwords, tokens and file names."""
    return ",".join(_without_account(url) for url in addresses(urls))


def _without_account(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def addresses(urls: str) -> list[str]:
    """Return the URLs as nats-py accepts them: without our own parameters."""
    return [url.partition("?")[0] for url in _members(urls)]


def _members(urls: str) -> list[str]:
    """Return each member's URL, with its scheme and its query."""
    first, *others = (url.strip() for url in urls.split(","))
    scheme, separator, _ = first.partition("://")
    return [first, *(url if "://" in url or not url else f"{scheme}{separator}{url}" for url in others)]


def account(urls: str) -> dict[str, str]:
    """Return the credentials as nats-py's options, decoded. As options they also apply to cluster members that the brokers
    announce. In a URL, nats-py would not decode them, and would use them for that URL only. With several accounts: empty."""
    found = {url.rpartition("://")[2].rpartition("@")[0] for url in addresses(urls)} - {""}
    parameters = _parameters(urls)
    options = {"nkeys_seed": parameters.get(NKEY, ""), "user_credentials": parameters.get(CREDS, "")}
    if len(found) == 1:
        user, colon, password = found.pop().partition(":")
        options |= (
            {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}
        )
    return {name: value for name, value in options.items() if value}


def user(urls: str) -> str:
    """Return our account name in the broker's permissions; empty: not stated."""
    return _parameters(urls).get(USER, "")


def inbox(urls: str) -> str:
    """Return the subject below which we receive replies. If the broker knows our account, it lets no other process subscribe."""
    name = user(urls)
    return f"{INBOX}.{name}" if name else INBOX


def keys(urls: str) -> Path | None:
    """Return the folder of seeds in the URLs."""
    found = _parameters(urls).get(KEYS)
    return Path(found) if found else None


def with_keys(urls: str, folder: Path) -> str:
    """Return URLs with which each process selects its own seed in a folder."""
    return f"{urls}?{KEYS}={quote(str(folder))}"


def as_user(urls: str, name: str) -> str:
    """Return the URLs for one account. Without a folder of seeds, they are the same for all. Raise BadBrokerUrl."""
    folder = keys(urls)
    if folder is None:
        return urls
    seed = folder / f"{name}{SUFFIX}"
    if not seed.is_file():
        raise BadBrokerUrl(
            f"{folder} has no seed for the account {name!r} ({seed.name}); `holdfast nats permissions` creates missing seeds"
        )
    return f"{','.join(addresses(urls))}?{NKEY}={quote(str(seed))}&{USER}={quote(name)}"


def _parameters(urls: str) -> dict[str, str]:
    """Return the parameters of the URLs' queries."""
    found = {}
    for url in urls.split(","):
        for part in filter(None, url.strip().partition("?")[2].split("&")):
            name, _, value = part.partition("=")
            found[name] = unquote(value)
    return found


class BadBrokerUrl(HoldfastError):
    """A broker's URL has the form nats://host:port. Several are separated by commas."""


def check_url(urls: str) -> None:
    """Raise BadBrokerUrl for URLs that cannot denote a broker: with some of these, nats-py's task would end silently."""
    for url in _members(urls):
        try:
            parts = urlsplit(url)
            good = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is not a number
            good = False
        if not good:
            raise BadBrokerUrl(f"{masked(url)!r} is not a broker's URL. {BadBrokerUrl.__doc__}")
    for name, value in _parameters(urls).items():
        if name not in ASIDE or not value:
            raise BadBrokerUrl(
                f"{masked(urls)!r}: unknown parameter {name!r} of a broker's URL; the parameters are {', '.join(ASIDE)}"
            )
        if name in (NKEY, CREDS) and not Path(value).is_file():
            raise BadBrokerUrl(f"{masked(urls)!r}: {name} names {value}, and there is no such file")
