"""The engine: executes a schedule on a backend and records what really happened."""
