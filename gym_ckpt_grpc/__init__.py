"""Consistent checkpoints of reinforcement-learning rollouts across all servers that hold them."""
