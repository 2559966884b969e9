"""Cuts a step into the stages of a pipeline."""
