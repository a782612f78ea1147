"""The load generator: which requests are sent, when, and to what."""
