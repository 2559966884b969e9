"""Measures what computing and sending take on the machines at hand."""
