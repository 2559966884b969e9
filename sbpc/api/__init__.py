"""The calls that a user makes: plan, baseline, load, sweep and the torch.compile backend."""
