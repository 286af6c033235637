"""A page to look at runs with: served while they are sampled, written to one file, or shown in a notebook."""
