"""Weights of the authors' models are drawn from the global generator: the same in every run."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
