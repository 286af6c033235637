"""The losses at every draw, on disk or in a store elsewhere."""
