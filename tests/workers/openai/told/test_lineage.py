"""A server's reports of its weights and computation become one name, which no restart changes."""

import pytest
from upstream import Upstream as Server

from workers.engines.openai.capabilities import Abilities, merged
from workers.engines.openai.upstream import Upstream


def test_only_the_last_part_of_a_folder_counts_and_key_separators_are_replaced() -> None:
    one, other = (Abilities("m", root=root, context_tokens=8192) for root in ("/models/a/", "/mnt/a"))
    assert one.lineage == other.lineage
    told = {"/p": (("quantization", "x,y z"),)}
    assert Abilities("m", root="a|b", told=told).lineage == "root=a_b,quantization=x_y_z"
    assert Abilities("m").lineage == ""


def test_an_unreadable_page_keeps_its_previous_values() -> None:
    known = {"/a": (("x", "1"),), "/b": (("y", "2"),)}
    assert merged(known, {"/a": None, "/b": (("y", "3"),)}) == {"/a": (("x", "1"),), "/b": (("y", "3"),)}


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (Server(root="/m/a"), "root=a,max_model_len=2048"),
        (Server(manner="llamacpp", size=77), "max_model_len=2048,size=77"),
        (
            Server(
                root="a",
                tells={
                    "weight_version": "e7",
                    "quantization": "fp8",
                    "kv_cache_dtype": "fp8_e5m2",
                    "attention_backend": "flashinfer",
                    "start": 3.5,
                },
            ),
            "root=a,max_model_len=2048,weight_version=e7,quantization=fp8,kv_cache_dtype=fp8_e5m2,"
            "attention_backend=flashinfer",
        ),
        (
            Server(metrics='vllm:cache_config_info{cache_dtype="fp8"} 1\n'),
            "max_model_len=2048,kv_cache_dtype=fp8",
        ),
    ],
    ids=["vllm", "llamacpp", "sglang", "vllm-metrics"],
)
async def test_the_lineage_of_each_server(server: Server, told: str) -> None:
    await server.start()
    client = Upstream(server.url, "", 4)
    try:
        first, again = await client.abilities(), await client.abilities()
        assert first.lineage == told
        assert again.lineage == told  # `created` and similar fields differ in each answer
    finally:
        await client.close()
        await server.stop()
