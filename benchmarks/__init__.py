"""Speed and memory, with committed records and the environment they came from."""
