"""`dbench search-capacity`: plan, search, print what was found."""

from __future__ import annotations
