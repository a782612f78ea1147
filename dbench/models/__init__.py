"""Models that come with dbench: directories in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path


def embedded_directory() -> Path:
    """The directory of the small model behind the name 'embedded'."""
    return Path(__file__).parent / "embedded"
