"""A run: from what was asked, through its directory, to a result that can be read."""
