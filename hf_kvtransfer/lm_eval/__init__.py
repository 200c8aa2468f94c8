"""A model for EleutherAI's lm-evaluation-harness. Needs the extra `eval`."""
