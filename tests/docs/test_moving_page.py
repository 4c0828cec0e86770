"""docs/guides/planned-moves.md repeats numbers of the code, which must be equal."""

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

from controller.config.flags import flatten
from controller.migration.cost import KvShape, MigrationTarget, MovingPolicy, estimate
from controller.migration.links import Lane, LinkName, LinkTable
from events.observations import Profile

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "planned-moves.md").read_text()
SEVENTY_B = KvShape(layers=80, kv_heads=8, head_size=128, bytes_per_element=2, tp=8)
PROFILE = Profile(kv_blocks=1, block_tokens=16, max_batch=1, prefill_tokens_per_s=5000.0, tpot_ms=())


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n|")[2].partition("\n\n")[0]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.split("\n")[2:]]


def test_the_page_shows_the_table_of_links() -> None:
    shown = {row[0]: tuple(float(cell.removesuffix(" µs")) for cell in row[1:5]) for row in rows("Links")}
    assert set(shown) == set(get_args(LinkName))
    for name, (bytes_per_s, efficiency, arrives, latency_us) in shown.items():
        spec = LinkTable().spec(name)
        assert (bytes_per_s, efficiency) == (spec.bytes_per_s, spec.efficiency)
        assert (arrives, latency_us) == (round(spec.rate / 1e9), round(spec.latency_s * 1e6, 1))


def test_the_page_shows_transfer_times() -> None:
    links: list[LinkName] = ["nvswitch", "nvlink_direct", "pcie_gen5", "infiniband", "pcie_gen4"]
    ways = [*map(Lane, links), Lane("tcp", sharers=8)]
    for tokens, *shown in rows("Predicted times"):
        for lane, text in zip(ways, shown, strict=False):
            to = MigrationTarget(name="g", profile=PROFILE, free_blocks=0, lanes=(lane,) * 8)
            cost = estimate(MovingPolicy(), SEVENTY_B, to, int(tokens.replace(",", "")))
            assert float(f"{cost.transfer_time_ms:.3g}") == float(f"{float(text.replace(',', '')):.3g}")
            assert round(cost.reprefill_time_ms, 1 if tokens == "256" else None) == float(
                shown[-1].replace(",", "")
            )


def test_the_page_names_every_setting_and_its_default() -> None:
    shown = {row[0]: row[1] for row in rows("Settings")}
    policy = MovingPolicy()
    for name, value in flatten(policy, "moving"):
        path = name.removeprefix("moving.").upper().replace(".", "__")
        path = re.sub(r"^LINKS__.+__", "LINKS__<LINK>__", path)
        assert shown[path] in ("above", str(value), f"{value:g}" if isinstance(value, float) else "")
    assert len(shown) == len(fields(policy)) + 3
