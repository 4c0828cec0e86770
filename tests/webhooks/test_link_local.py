"""Webhooks never post to link-local or metadata addresses unless the operator allows it."""

import socket
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from controller.webhooks.sender import GuardedResolver
from controller.webhooks.settings import LinkLocalRefused, NotifierSettings, refusal

REFUSED = [
    "169.254.169.254", "169.254.0.1", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "169.16689662",
    "[fe80::1]", "[fe80::1%25eth0]", "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::]",
    "[fd00:ec2::254]", "100.100.100.200", "metadata.google.internal", "METADATA.google.internal.",
]  # fmt: skip
ALLOWED = [
    "127.0.0.1",
    "10.0.0.7",
    "192.168.1.1",
    "[::1]",
    "[fd12::1]",
    "hooks.slack.com",
    "169.253.1.1",
    "metadata.example.org",
]


def settings(host: str, **more: Any) -> NotifierSettings:
    return NotifierSettings(webhooks=[{"url": f"http://{host}:8080/latest"}], **more)


@pytest.mark.parametrize("host", REFUSED)
def test_a_link_local_or_metadata_url_is_rejected_at_the_start(host: str) -> None:
    with pytest.raises(ValueError, match=r"link-local|metadata"):
        settings(host)
    assert settings(host, allow_link_local=True).webhooks


@pytest.mark.parametrize("host", ALLOWED)
def test_other_urls_are_accepted(host: str) -> None:
    assert settings(host).webhooks and not refusal(host.strip("[]"))


class Names(AbstractResolver):
    """Resolves every name to one address."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host=self.address, port=port, family=socket.AF_INET, proto=0, flags=0
            )
        ]

    async def close(self) -> None:
        pass


async def test_a_name_with_a_forbidden_address_is_rejected_when_it_is_resolved() -> None:
    """A URL is checked at the start; its name may later resolve to another address."""
    assert (await GuardedResolver(Names("10.0.0.7")).resolve("hook.example"))[0]["host"] == "10.0.0.7"
    with pytest.raises(LinkLocalRefused, match=r"hook\.example: 169\.254\.169\.254 is a link-local"):
        await GuardedResolver(Names("169.254.169.254")).resolve("hook.example")
