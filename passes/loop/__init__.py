"""Rewrites a step as a loop: several micro-batches, and values of the forward that the backward computes again."""
