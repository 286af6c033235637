"""What Jostle finds on real models and data: one script an experiment, each with its committed record."""
