"""Rewrites that leave the numbers as they are and the rules fewer and simpler."""
