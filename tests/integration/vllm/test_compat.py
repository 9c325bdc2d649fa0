# SPDX-License-Identifier: Apache-2.0
"""Which releases of the engine are taken."""

import pytest
import torch
import vllm

from ucm.errors import ConfigError
from ucm.integration.vllm.compat import check_version, engine_name


class TestVersion:
    @pytest.mark.parametrize("version", ["0.32.0", "0.32.5", "0.32.1.dev3+cpu"])
    def test_known_release_is_taken(self, monkeypatch, version):
        """Any build of a minor release whose hooks were tested is taken."""
        monkeypatch.setattr(vllm, "__version__", version)
        check_version()

    @pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "dev", ""])
    def test_unknown_release_is_refused_with_those_known(self, monkeypatch, version):
        """An engine whose hooks are not known is refused at start-up, by name."""
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(ConfigError) as caught:
            check_version()
        assert ("vllm", version) == (caught.value.key, caught.value.value)
        assert "Install vLLM 0.32" in caught.value.remedy


class TestEngineName:
    def test_name_on_a_gpu_is_release_and_device(self, monkeypatch):
        """Patches of a minor release share; its device is part of it."""
        monkeypatch.setattr(vllm, "__version__", "0.32.7")
        assert "vllm/0.32/cuda" == engine_name("cuda")

    @pytest.mark.parametrize("what", ["_is_amx_tile_supported", "_is_avx512_supported"])
    def test_instruction_set_is_part_of_a_cpu_engine(self, monkeypatch, what):
        """CPU kernels pack pages by instruction set; bytes of another do not fit."""
        names = []
        for answer in (False, True):
            monkeypatch.setattr(torch.cpu, what, lambda answer=answer: answer)
            names.append(engine_name("cpu"))
        assert 2 == len(set(names))
