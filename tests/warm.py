"""What every forked rank would do again: imports, and the first plan, which fills torch's and sbpc's tables. Nothing runs backward
here, as torch starts threads for that where there are GPUs, and a process with threads cannot be forked."""

from __future__ import annotations

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed.checkpoint
from torch import nn

import sbpc
import sbpc.api.sweep
import sbpc.cli.main
import sbpc.runtime.exported
import sbpc.runtime.state.checkpoint

torch.set_num_threads(1)
sbpc.plan(nn.Linear(4, 4, device="meta"), (torch.empty(4, 4, device="meta"),), sbpc.Mesh(x=2), train=False)
