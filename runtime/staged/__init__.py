"""Runs a loop over micro-batches on a rank, with stages or with one."""
