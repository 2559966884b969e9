"""What runs a plan: under torchrun on the ranks of a job, or all ranks in one process."""
