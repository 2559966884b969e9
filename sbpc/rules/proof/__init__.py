"""Proofs of rules: every signature is run on shards; rules of the user's own, probed and reviewed ones."""
