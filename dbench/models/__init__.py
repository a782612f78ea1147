"""Models that come with dbench: directories in Hugging Face layout.

`embedded` has a tokenizer and weights. A folder of `sizes` has the shapes and special ids of a published model, or of
a small one like it, and nothing else: a server takes its name with --load-format random.
"""

from __future__ import annotations

from pathlib import Path


def embedded_directory() -> Path:
    """The directory of the small model behind the name 'embedded'."""
    return Path(__file__).parent / "embedded"


def size_directory(name: str) -> Path:
    """The directory of a named size, which need not exist."""
    return Path(__file__).parent / "sizes" / name


def size_names() -> tuple[str, ...]:
    """The sizes that have a directory, sorted."""
    return tuple(sorted(path.name for path in size_directory(".").iterdir() if (path / "config.json").is_file()))
