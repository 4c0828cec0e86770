"""The mapping of GPUs to a worker."""

import os

import pytest

from workers.devices.mapping import UnknownGpus, find_uuids, own_pids, parse, used
from workers.devices.nvml import Device

HERE = (Device(0, "GPU-5dab", "H100"), Device(1, "GPU-5dcd", "H100"))


def test_gpus_are_named_by_index_or_uuid() -> None:
    assert parse(" 0, GPU-5dcd ") == ("0", "GPU-5dcd")
    assert parse("") == ()
    assert find_uuids(("1", "GPU-5dab"), HERE) == ("GPU-5dcd", "GPU-5dab")
    assert find_uuids(("0", "GPU-5da"), HERE) == ("GPU-5dab",)


@pytest.mark.parametrize("text", ["a", "0,,1", "-1", "0,0", "GPU", "0;1"])
def test_invalid_gpu_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|twice"):
        parse(text)


@pytest.mark.parametrize("name", ["2", "GPU-6", "GPU-5d"])
def test_a_missing_or_ambiguous_gpu_is_refused(name: str) -> None:
    with pytest.raises(UnknownGpus, match=name):
        find_uuids((name,), HERE)


def test_a_gpu_is_ours_when_one_of_our_processes_computes_on_it() -> None:
    assert used({"GPU-a": {1, 2}, "GPU-b": {3}}, {2, 9}) == ("GPU-a",)
    assert os.getpid() in own_pids()
