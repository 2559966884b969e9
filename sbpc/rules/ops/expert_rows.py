"""Rows of experts: taking them to their places and back (`sbpc.graph.expert_rows`), and what an expert has room for."""

from __future__ import annotations

import torch

from sbpc.graph.expert_rows import GATHER, SCATTER
from sbpc.rules.match import FREE, WRITTEN
from sbpc.rules.moved_rows import gathered, scattered
from sbpc.rules.registry import rule

WITHIN = torch.ops.sbpc.within_capacity.default

rule(GATHER, "v *d, i, g -> i *d ; lin(0) ; fix v g", flops=FREE, local=gathered)
rule(WITHIN, "i -> i, i ; fix i", flops=WRITTEN)
rule(SCATTER, "i *d, i, g, [v] -> v *d ; +i ; lin(0) ; fix v g", flops=WRITTEN, local=scattered)
