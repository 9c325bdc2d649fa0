# SPDX-License-Identifier: Apache-2.0
"""What of an engine has to do with weights: a model, a runner and a worker."""

import torch

from ucm.integration.vllm.weights import EngineParts


class TinyModel(torch.nn.Module):
    """A model of one layer, loaded as an engine loads one."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("made", torch.zeros(3), persistent=False)
        self.fill(value)

    def fill(self, value: float) -> None:
        """Write weights that nobody sees being written."""
        for parameter in self.parameters():
            parameter.data.fill_(value)

    def load_weights(self, value: float) -> str:
        """Write weights as a loader does."""
        self.fill(value)
        return "loaded"


class PackedModel(TinyModel):
    """A model whose layer keeps its weights out of reach, as on CPU."""

    def fill(self, value: float) -> None:
        """Pack anew."""
        self.layer.weight = torch.nn.Parameter(torch.empty(0))
        self.layer.packed = lambda x: x * value


class TinyRunner:
    """Has the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def get_model(self) -> torch.nn.Module:
        """Return it, as all runners do."""
        return self.model

    def reload_weights(self, value: float) -> None:
        """Load again."""
        self.model.load_weights(value)


class TinyWorker(TinyRunner):
    """Has the runner, and may be sent to sleep."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.asleep: list[str] = []

    def sleep(self, level: int = 1) -> None:
        """Take note."""
        self.asleep.append(f"sleep {level}")

    def wake_up(self) -> None:
        """Take note."""
        self.asleep.append("wake up")


def parts_of(model: torch.nn.Module) -> EngineParts:
    """Return an engine around a model."""
    return EngineParts((model,), (TinyRunner(model), TinyWorker(model)))
