"""How much memory is free, within a container's limit."""

import pytest
import torch

from draftsmith.inference import memory
from draftsmith.inference.memory import free_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("names", memory.CGROUPS, ids=["version 2", "version 1"])
def test_a_containers_limit_counts_without_the_files_that_were_read(tmp_path, monkeypatch, names):
    free = free_memory(CPU)
    assert 0 < free < 2**50
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    limit, used, statistics = (tmp_path / name for name in names)
    assert free_memory(CPU) > 1000, "no container"
    limit.write_text("5000\n")
    used.write_text("4900\n")
    statistics.write_text("anon 100\nactive_file 300\ninactive_file 400\nunevictable 0\n")
    assert free_memory(CPU) == 800
    used.write_text("5900\n")
    assert free_memory(CPU) == 0
    limit.write_text("max\n")
    assert free_memory(CPU) > 5000
