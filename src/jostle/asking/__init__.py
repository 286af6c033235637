"""What a command asks for: its words, files and presets turned into a call."""
