"""Plans with the stages of a pipeline: what they are made of, and what they cost."""
