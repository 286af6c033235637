"""Curvature of the loss around a checkpoint: products with it, its inverse, and gradients of single examples."""
