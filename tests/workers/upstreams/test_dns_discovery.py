"""Discovery by DNS: each address is an upstream, and the last set stays while DNS fails."""

import asyncio
from collections.abc import Collection

import pytest

from workers.config.upstream_route import UpstreamTls
from workers.config.upstreams import UpstreamEntry
from workers.upstreams.discovery import (
    ADDRESSES_MAX,
    MISSING_ANSWERS,
    AddressSet,
    DnsDiscovery,
    expanded,
    merged,
    resolve,
)

POOL = UpstreamEntry(name="pool", url="https://gpus:8000", weight=0.5, discover="dns")


def test_new_addresses_are_added_at_once() -> None:
    found = AddressSet()
    assert found.answered(["10.0.0.2", "10.0.0.1"])
    assert not found.answered(["10.0.0.1", "10.0.0.2"])
    assert found.answered(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
    assert found.addresses == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_an_address_is_removed_only_after_several_answers_without_it() -> None:
    found = AddressSet()
    found.answered(["a", "b"])
    for _ in range(MISSING_ANSWERS - 1):
        assert not found.answered(["a"])
    for _ in range(MISSING_ANSWERS - 1):
        assert not found.answered(["b"]), "a rotating answer removes no address"
    assert found.answered(["b"])
    assert found.addresses == ["b"]


def test_the_last_set_stays_while_the_name_is_not_resolved() -> None:
    found = AddressSet()
    found.answered(["a"])
    for _ in range(10):
        found.failed("no such host")
        assert (found.addresses, found.error) == (["a"], "no such host")
    for _ in range(10):
        assert not found.answered([])
    assert (found.addresses, found.error) == (["a"], "the answer has no address")
    found.answered(["a"])
    assert found.error == ""


def test_a_wrong_answer_cannot_start_any_number_of_workers() -> None:
    found = AddressSet()
    found.answered([f"10.0.{n // 256}.{n % 256}" for n in range(ADDRESSES_MAX + 100)])
    assert len(found.addresses) == ADDRESSES_MAX


@pytest.mark.parametrize(
    ("address", "name", "url"),
    [
        ("10.0.0.7", "pool-10-0-0-7", "https://10.0.0.7:8000/"),
        ("fd00::7", "pool-fd00--7", "https://[fd00::7]:8000/"),
    ],
)
def test_an_address_inherits_the_fields_and_its_certificate_is_for_the_name(
    address: str, name: str, url: str
) -> None:
    entry = expanded(POOL, address)
    assert (entry.name, entry.url.rstrip("/"), entry.weight, entry.discover) == (
        name,
        url.rstrip("/"),
        0.5,
        "",
    )
    assert entry.tls == UpstreamTls(server_name="gpus")


def test_a_listed_entry_wins_over_a_discovered_one() -> None:
    discovered = [expanded(POOL, "10.0.0.7"), expanded(POOL, "10.0.0.8")]
    listed = UpstreamEntry(name="own", url=discovered[0].url, weight=1.0)
    assert [entry.name for entry in merged([POOL, listed], discovered)] == ["own", "pool-10-0-0-8"]


async def test_the_name_is_resolved_again_and_again() -> None:
    answers: list[Collection[str] | OSError] = [["a"], OSError(-2, "Name or service not known"), ["a", "b"]]
    seen: list[tuple[list[str], str]] = []
    changed: list[list[str]] = []
    over = asyncio.Event()

    async def answer(host: str) -> Collection[str]:
        assert host == "gpus"
        seen.append((found.found.addresses, found.found.error))
        if not answers:
            over.set()
            await asyncio.Event().wait()
        one = answers.pop(0)
        if isinstance(one, OSError):
            raise one
        return one

    found = DnsDiscovery(POOL, lambda: changed.append(found.found.addresses), answer, every_s=0.0)
    running = asyncio.ensure_future(found.run())
    async with asyncio.timeout(20):
        await over.wait()
    running.cancel()
    assert changed == [["a"], ["a", "b"]]
    assert seen == [
        ([], ""),
        (["a"], ""),
        (["a"], "gpus cannot be resolved: Name or service not known"),
        (["a", "b"], ""),
    ]
    assert [entry.name for entry in found.entries()] == ["pool-a", "pool-b"]


async def test_the_system_resolves_names() -> None:
    assert "127.0.0.1" in await resolve("localhost")
    with pytest.raises(OSError):
        await resolve("does-not-exist.invalid")
