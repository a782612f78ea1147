"""The server: scheduler, workers and the engine that decodes."""
