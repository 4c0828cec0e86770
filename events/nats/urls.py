"""Parses broker URLs into addresses, the account, and a form that may be displayed.

    nats://USER:PASSWORD@host:4222      an account; or nats://TOKEN@host:4222 with a token
    tls://host:4222?nkey=FILE           an nkey's seed
    tls://host:4222?creds=FILE          a user's JWT and its seed, as `nsc` writes them
    ...&user=NAME                       the account's name in the broker's permissions; replies to it go to _INBOX.NAME
    nats://host:4222?keys=DIR           DIR has a seed per account, and every process selects its own (`as_user`)

A URL may list several members of a cluster, separated by commas. It is enough if one of them has credentials. Members without a
scheme get the scheme of the first member: nats://a:4222,b:4222.
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
    """Return broker URLs in a form that may be displayed, without passwords, tokens and file names."""
    return ",".join(_without_account(url) for url in addresses(urls))


def _without_account(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def addresses(urls: str) -> list[str]:
    """Return the URL of each broker as nats-py accepts it, without Holdfast's own parameters."""
    return [url.partition("?")[0] for url in _members(urls)]


def _members(urls: str) -> list[str]:
    """Return the URL of each cluster member, with its scheme and its query."""
    first, *others = (url.strip() for url in urls.split(","))
    scheme, separator, _ = first.partition("://")
    return [first, *(url if "://" in url or not url else f"{scheme}{separator}{url}" for url in others)]


def account(urls: str) -> dict[str, str]:
    """Return the credentials in the URLs as nats-py's options, decoded.

    If the URLs contain different user names with passwords, or different tokens, the options contain none of these. Credentials
    as options also apply to cluster members that the brokers announce. nats-py would not decode credentials in a URL, and would
    use them for that URL only.
    """
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
    """Return this process's account name in the broker's permissions, or "" if the URLs do not state it."""
    return _parameters(urls).get(USER, "")


def inbox(urls: str) -> str:
    """Return the subject below which this process receives replies. If the URLs name an account, the broker lets no other
    account subscribe there."""
    name = user(urls)
    return f"{INBOX}.{name}" if name else INBOX


def keys(urls: str) -> Path | None:
    """Return the folder of seeds that the URLs name, or None."""
    found = _parameters(urls).get(KEYS)
    return Path(found) if found else None


def with_keys(urls: str, folder: Path) -> str:
    """Return URLs with which each process selects its own seed in `folder`."""
    return f"{urls}?{KEYS}={quote(str(folder))}"


def as_user(urls: str, name: str) -> str:
    """Return the URLs for the account `name`. URLs without a folder of seeds are returned unchanged. Raise BadBrokerUrl if
    the folder has no seed for the account."""
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
    """Return the decoded parameters of the URLs' queries, by name."""
    found = {}
    for url in urls.split(","):
        for part in filter(None, url.strip().partition("?")[2].split("&")):
            name, _, value = part.partition("=")
            found[name] = unquote(value)
    return found


class BadBrokerUrl(HoldfastError):
    """A broker's URL has the form nats://host:port. Several are separated by commas."""


def check_url(urls: str) -> None:
    """Raise BadBrokerUrl for invalid broker URLs. Without this check, some invalid URLs would end nats-py's task silently."""
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
