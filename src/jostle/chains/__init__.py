"""Chains: how they move, what is seen of them, and what is kept."""
