# SPDX-License-Identifier: Apache-2.0
"""Weights that must not be mixed up, told apart before the engine serves."""

import json
from pathlib import Path

import pytest

from ucm.integration.weight_files import weights_digest


def write_tensors(path: Path, tensors: dict[str, bytes]) -> None:
    """Write a safetensors file."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(tensors.values())
    )


class TestWeights:
    @pytest.mark.parametrize("trained", range(40))
    def test_one_tensor_trained_further_is_another_model(
        self, tmp_path: Path, trained: int
    ) -> None:
        """Whichever tensor of a large file differs, the digest does."""
        tensors = {f"t{n}": bytes([n]) * 100_000 for n in range(40)}
        write_tensors(tmp_path / "model.safetensors", tensors)
        before = weights_digest(tmp_path)
        tensors[f"t{trained}"] = bytes([99]) * 100_000
        write_tensors(tmp_path / "model.safetensors", tensors)
        assert before != weights_digest(tmp_path)

    def test_file_without_a_header_is_read_whole(self, tmp_path: Path) -> None:
        """A damaged or foreign file counts with every byte."""
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"\xff" * 9 + bytes(500_000))
        before = weights_digest(tmp_path)
        path.write_bytes(b"\xff" * 9 + bytes(250_000) + b"\x01" + bytes(249_999))
        assert before != weights_digest(tmp_path)
