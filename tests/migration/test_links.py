"""The link that joins two groups, its speed, and the rejection of invalid tables."""

import pytest

from controller.config.flags import gather
from controller.frontend.settings import FrontendSettings
from controller.migration.links import Lane, LinkSpec, LinkTable, lanes
from events.errors import BadSetting
from events.observations import Topology

MIB = 1024 * 1024
GPUS = tuple(f"GPU-{n}" for n in range(8))
LINKS = LinkTable()


def at(host: str, *, domain: str = "", rail: str = "", gpus: tuple[str, ...] = GPUS) -> Topology:
    return Topology(host=host, nvlink_domain=domain, rail=rail, gpus=gpus)


# --- the table ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mib", "ms"), [(10, 0.0117), (40, 0.0466), (160, 0.186), (640, 0.746), (2560, 2.98), (5120, 5.97)]
)
def test_n10_the_seeds_table_at_900_gb_per_second(mib: int, ms: float) -> None:
    assert LinkSpec(bytes_per_s=900e9).wire_s(mib * MIB) * 1000 == pytest.approx(ms, rel=5e-3)


@pytest.mark.parametrize(("rate", "ms"), [(28e9, 192), (55e9, 98), (63e9, 85)])
def test_n11_five_gib_over_pcie(rate: float, ms: float) -> None:
    assert LinkSpec(bytes_per_s=rate).wire_s(5120 * MIB) * 1000 == pytest.approx(ms, rel=5e-3)


def test_n11_gen4_and_gen5_are_two_links() -> None:
    encoded = 16 * 128 / 130 / 8  # lanes, 128b/130b, bytes per transfer
    assert LINKS.pcie_gen4.bytes_per_s == pytest.approx(16e9 * encoded, rel=1e-3)
    assert LINKS.pcie_gen5.bytes_per_s == pytest.approx(32e9 * encoded, rel=1e-3)
    assert LINKS.pcie_gen4.rate == pytest.approx(28e9, rel=1e-3)
    assert LINKS.pcie_gen5.rate == pytest.approx(55e9, rel=1e-3)


def test_n12_nvlink_is_counted_in_one_direction() -> None:
    assert LINKS.nvlink_direct.bytes_per_s == 450e9, "NVLink 4: 18 links of 25 GB/s each way"
    assert LINKS.nvswitch.bytes_per_s == 900e9, "NVLink 5: 18 links of 50 GB/s each way"


def test_an_unknown_link_carries_10_gb_per_second() -> None:
    assert LINKS.tcp.rate == pytest.approx(10e9)


def test_an_unknown_link_name_is_rejected() -> None:
    assert LINKS.spec("nvswitch") is LINKS.nvswitch
    for name in ("carrier_pigeon", "pcie", "spec"):
        with pytest.raises(
            ValueError, match=f"'{name}' is not a link: it must be one of nvlink_direct, nvswitch"
        ):
            LINKS.spec(name)


# --- which link joins two groups --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "other", "lane"),
    [
        (at("a", domain="d"), at("a", domain="d"), Lane("nvlink_direct")),
        (at("a", domain="d"), at("b", domain="d"), Lane("nvswitch")),
        (at("a", domain="d"), at("a", domain="e"), Lane("pcie_gen4")),
        (at("a"), at("a"), Lane("pcie_gen4")),
        (at("a", rail="0"), at("b", rail="0"), Lane("infiniband")),
        (at("a", domain="d", rail="0"), at("b", domain="e", rail="0"), Lane("infiniband")),
    ],
)
def test_the_link_follows_from_the_location_of_the_devices(
    source: Topology, other: Topology, lane: Lane
) -> None:
    assert lanes(LINKS, source, other, 8) == (lane,) * 8
    assert lanes(LINKS, other, source, 8) == (lane,) * 8


def test_b18_each_device_has_its_own_adapter_only_on_one_rail() -> None:
    assert lanes(LINKS, at("a", rail="0"), at("b", rail="1"), 8) == (Lane("infiniband", sharers=8),) * 8


@pytest.mark.parametrize(
    ("source", "other"),
    [
        (Topology(), Topology()),
        (at("a"), Topology()),
        (at(""), at("")),
        (at("", domain="d"), at("", domain="d")),
        (at("a"), at("b")),
        (at("a", rail="0"), at("b")),
        (at("a", domain="d", gpus=()), at("a", domain="d")),
        (at("a", gpus=()), at("a", gpus=())),
    ],
)
def test_without_registration_the_link_is_slow_and_shared(source: Topology, other: Topology) -> None:
    assert lanes(LINKS, source, other, 8) == (Lane("tcp", sharers=8),) * 8
    assert lanes(LINKS, other, source, 8) == (Lane("tcp", sharers=8),) * 8


def test_the_pcie_generation_is_a_setting() -> None:
    assert lanes(LinkTable(pcie="pcie_gen5"), at("a"), at("a"), 2) == (Lane("pcie_gen5"),) * 2


# --- as settings ------------------------------------------------------------------------------------------------


def moving(**variables: str) -> FrontendSettings:
    environment = {f"HOLDFAST_FRONTEND__MOVING__{name}": text for name, text in variables.items()}
    return gather(FrontendSettings, "frontend", {}, environment)


def test_a_single_number_of_a_link_can_be_set() -> None:
    links = moving(LINKS__TCP__BYTES_PER_S="2e9", LINKS__PCIE="pcie_gen5").moving.links
    assert links.tcp == LinkSpec(
        bytes_per_s=2e9, latency_s=LINKS.tcp.latency_s, efficiency=LINKS.tcp.efficiency
    )
    assert links.pcie == "pcie_gen5"
    assert links.infiniband == LINKS.infiniband


def test_a_link_can_be_set_as_json() -> None:
    links = moving(LINKS='{"infiniband": {"bytes_per_s": 1e11}}').moving.links
    assert links.infiniband.bytes_per_s == 1e11
    assert links.infiniband.efficiency == LINKS.infiniband.efficiency


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("LINKS__TCP__BYTES_PER_S", "0", "frontend.moving.links.tcp: bytes_per_s is 0.0: it must be"),
        ("LINKS__TCP__BYTES_PER_S", "-1", "frontend.moving.links.tcp: bytes_per_s is -1.0: it must be"),
        ("LINKS__TCP__BYTES_PER_S", "nan", "frontend.moving.links.tcp: bytes_per_s is nan: it must be"),
        ("LINKS__TCP__BYTES_PER_S", "inf", "frontend.moving.links.tcp: bytes_per_s is inf: it must be"),
        ("LINKS__TCP__BYTES_PER_S", "1e-320", "frontend.moving.links.tcp: bytes_per_s x efficiency is"),
        ("LINKS__TCP__BYTES_PER_S", "fast", "frontend.moving.links.tcp.bytes_per_s = 'fast'"),
        ("LINKS__NVSWITCH__EFFICIENCY", "0", "frontend.moving.links.nvswitch: efficiency is 0.0: it must be"),
        (
            "LINKS__NVSWITCH__EFFICIENCY",
            "1.1",
            "frontend.moving.links.nvswitch: efficiency is 1.1: it must be",
        ),
        (
            "LINKS__NVSWITCH__EFFICIENCY",
            "nan",
            "frontend.moving.links.nvswitch: efficiency is nan: it must be",
        ),
        (
            "LINKS__PCIE_GEN5__LATENCY_S",
            "-1",
            "frontend.moving.links.pcie_gen5: latency_s is -1.0: it must be",
        ),
        (
            "LINKS__PCIE_GEN5__LATENCY_S",
            "nan",
            "frontend.moving.links.pcie_gen5: latency_s is nan: it must be",
        ),
        ("LINKS__PCIE", "pcie_gen9", "frontend.moving.links.pcie = 'pcie_gen9'"),
        ("LINKS__PIGEON__BYTES_PER_S", "1", "LINKS__PIGEON__BYTES_PER_S is not a setting"),
        ("LINKS", '{"pigeon": {"bytes_per_s": 1}}', "frontend.moving.links.pigeon"),
        ("LINKS", "[1]", "frontend.moving.links = "),
        ("SETUP_S", "nan", "frontend.moving: setup_s is nan: it must be"),
        ("PREFILL_TOKENS_PER_S", "0", "frontend.moving: prefill_tokens_per_s is 0.0: it must be"),
        ("MAX_MIGRATION_TIME_MS", "-5", "frontend.moving: max_migration_time_ms is -5.0: it must be"),
        ("TRANSFERS_AT_ONCE", "0", "frontend.moving: transfers_at_once is 0: it must be"),
    ],
)
def test_an_invalid_table_is_rejected_by_name(variable: str, text: str, says: str) -> None:
    with pytest.raises(BadSetting) as refused:
        moving(**{variable: text})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


@pytest.mark.parametrize("broken", [{"bytes_per_s": 0.0}, {"bytes_per_s": 1.0, "efficiency": 2.0}])
def test_a_link_made_in_code_is_validated_too(broken: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="it must be"):
        LinkSpec(**broken)
    with pytest.raises(ValueError, match="pcie is 'tcp'"):
        LinkTable(pcie="tcp")  # type: ignore[arg-type]
