"""The embedded example: something to look at a minute after installation, with no data or model of one's own."""
