"""Runs the stages of a pipeline on a rank."""
