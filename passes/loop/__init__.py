"""Runs a step as several micro-batches."""
