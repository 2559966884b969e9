"""Trainers of other libraries train plans: `hf` for `transformers.Trainer` and those made of it."""

from sbpc.integrations.hf_trainer import hf

__all__ = ["hf"]
