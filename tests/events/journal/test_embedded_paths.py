"""The embedded servers work in directories with any name."""

from pathlib import Path

import pytest

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.postgres import start_postgres

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("name", ["Jürgens Ordner", 'a "quoted" one', "back\\slash", "日本語"])
async def test_a_directory_of_any_name_holds_a_broker(name: str, tmp_path: Path) -> None:
    server = await start_nats(tmp_path / name, monitor=0)
    try:
        assert Path(server.effective["store_dir"]).parent == tmp_path / name / "store"
    finally:
        assert await server.stop() == 0


async def test_a_directory_of_any_name_holds_a_database(tmp_path: Path) -> None:
    server = await start_postgres(tmp_path / "Jürgens 'Ordner' 日本語")
    assert await server.stop() == 0
