"""One PyTorch thread: the models are tiny, and threads of several processes on few cores only wait for each other."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread():
    torch.set_num_threads(1)
