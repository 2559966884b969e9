"""Parameters, optimizer state and checkpoints, laid out over the ranks."""
