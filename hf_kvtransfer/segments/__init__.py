"""Prompts whose ranges come from several sources, or from the target itself."""
