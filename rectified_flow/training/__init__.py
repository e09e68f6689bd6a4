"""Training: the loop, one step, and the state that a run carries from step to step."""
