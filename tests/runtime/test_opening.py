"""The device that an option names."""

import pytest
import torch

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime import opening


def test_a_cuda_device_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    found = [opening._device(name) for name in ("auto", "cuda", "cuda:0", "cuda:2", "cpu")]
    assert found == [torch.device(name) for name in ("cuda:1", "cuda:1", "cuda:0", "cuda:2", "cpu")]
    with pytest.raises(ConfigError, match="found 'cuda:3'; needed one of this machine's 3 CUDA devices"):
        opening._device("cuda:3")
