"""The model as a function of the weights that move."""
