"""Starts the stock tritonserver, watches it and its models' processes, and recovers what dies."""
