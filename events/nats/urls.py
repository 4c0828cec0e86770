"""Which brokers does a URL name, as whom do we come to them, and what of it may be shown?

    nats://USER:PASSWORD@host:4222      an account; nats://TOKEN@host:4222
    tls://host:4222?nkey=FILE           an nkey's seed
    tls://host:4222?creds=FILE          a user's JWT and its seed, as `nsc` writes them
    ...&user=NAME                       what the broker's permissions call us: our answers come to _INBOX.NAME
    nats://host:4222?keys=DIR           DIR has a seed for each user: every process finds its own (`as_user`)

Of several members of a cluster, with commas between, one is enough that has the credentials. The scheme of the first also
holds for members that name none: nats://a:4222,b:4222.
"""

from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from events.errors import HoldfastError

SCHEMES = ("nats", "tls", "ws", "wss")
NKEY, CREDS, USER, KEYS = "nkey", "creds", "user", "keys"
ASIDE = (NKEY, CREDS, USER, KEYS)  # what may stand behind a URL's question mark
SUFFIX = ".nk"
INBOX = "_INBOX"


def masked(urls: str) -> str:
    """Return brokers' URLs that may be shown: without their passwords and tokens, and without the names of files."""
    return ",".join(_without_account(url) for url in addresses(urls))


def _without_account(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def addresses(urls: str) -> list[str]:
    """Return the URLs as nats-py takes them: without what only we understand."""
    return [url.partition("?")[0] for url in _members(urls)]


def _members(urls: str) -> list[str]:
    """Return each member's URL, with its scheme and what stands behind its question mark."""
    first, *others = (url.strip() for url in urls.split(","))
    scheme, separator, _ = first.partition("://")
    return [first, *(url if "://" in url or not url else f"{scheme}{separator}{url}" for url in others)]


def account(urls: str) -> dict[str, str]:
    """Return who we are as nats-py's options, decoded: then it holds for those members of a cluster, too, that the brokers
    tell of. nats-py would decode nothing, and know it for none but the URL's own. Of several accounts: none."""
    found = {url.rpartition("://")[2].rpartition("@")[0] for url in addresses(urls)} - {""}
    said = _aside(urls)
    known = {"nkeys_seed": said.get(NKEY, ""), "user_credentials": said.get(CREDS, "")}
    if len(found) == 1:
        user, colon, password = found.pop().partition(":")
        known |= {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}
    return {name: value for name, value in known.items() if value}


def user(urls: str) -> str:
    """Return what the broker's permissions call us; empty: nobody has said."""
    return _aside(urls).get(USER, "")


def inbox(urls: str) -> str:
    """Return the subject below which we are answered: nobody else may listen there, where the broker knows who we are."""
    name = user(urls)
    return f"{INBOX}.{name}" if name else INBOX


def keys(urls: str) -> Path | None:
    """Return the folder of seeds that the URLs name."""
    found = _aside(urls).get(KEYS)
    return Path(found) if found else None


def with_keys(urls: str, folder: Path) -> str:
    """Return URLs with which each process finds its own seed in a folder."""
    return f"{urls}?{KEYS}={quote(str(folder))}"


def as_user(urls: str, name: str) -> str:
    """Return the URLs with which one user comes. Where they name no folder of seeds, they are everybody's. Raise BadBrokerUrl."""
    folder = keys(urls)
    if folder is None:
        return urls
    seed = folder / f"{name}{SUFFIX}"
    if not seed.is_file():
        raise BadBrokerUrl(
            f"{folder} has no seed for the user {name!r} ({seed.name}); `holdfast nats permissions` makes those that are missing"
        )
    return f"{','.join(addresses(urls))}?{NKEY}={quote(str(seed))}&{USER}={quote(name)}"


def _aside(urls: str) -> dict[str, str]:
    """Return what stands behind the URLs' question marks."""
    found = {}
    for url in urls.split(","):
        for part in filter(None, url.strip().partition("?")[2].split("&")):
            name, _, value = part.partition("=")
            found[name] = unquote(value)
    return found


class BadBrokerUrl(HoldfastError):
    """A broker's URL reads nats://host:port, or several of them with commas between."""


def check_url(urls: str) -> None:
    """Raise BadBrokerUrl unless a broker can be meant: nats-py's task would end in silence on some of the others."""
    for url in _members(urls):
        try:
            parts = urlsplit(url)
            good = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            good = False
        if not good:
            raise BadBrokerUrl(f"{masked(url)!r} is no broker's URL. {BadBrokerUrl.__doc__}")
    for name, value in _aside(urls).items():
        if name not in ASIDE or not value:
            raise BadBrokerUrl(
                f"{masked(urls)!r}: {name!r} is nothing that a broker's URL may say; it may name {', '.join(ASIDE)}"
            )
        if name in (NKEY, CREDS) and not Path(value).is_file():
            raise BadBrokerUrl(f"{masked(urls)!r}: {name} names {value}, and there is no such file")
