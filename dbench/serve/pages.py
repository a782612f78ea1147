"""The pool of KV pages of one worker: which page ids are free, and which are lent out.

A page holds `page_size` tokens. The pool knows numbers only; the memory belongs to the runner.
"""

from __future__ import annotations


class PagePool:
    """Page ids 0 .. num_pages-1; the page given back last is taken first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_lent = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._is_lent.count(1)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def take(self, num_tokens: int) -> tuple[int, ...] | None:
        """Pages for `num_tokens` tokens, or None (and nothing taken) when too few are free."""
        count = self.pages_for(num_tokens)
        if count > len(self._free):
            return None
        split = len(self._free) - count
        pages = tuple(reversed(self._free[split:]))
        del self._free[split:]
        for page in pages:
            self._is_lent[page] = 1
        return pages

    def give(self, pages: tuple[int, ...]) -> None:
        """Give pages back. Raises AssertionError for a page that is not lent, a foreign id included."""
        for page in pages:
            if not 0 <= page < self.num_pages or not self._is_lent[page]:
                raise AssertionError(f"page {page} was given back but is not lent ({self._counts()})")
            self._is_lent[page] = 0
            self._free.append(page)

    def check(self) -> None:
        """Raises AssertionError unless every page is either free, once, or lent."""
        in_free = set(self._free)
        torn = len(in_free) != len(self._free) or any(self._is_lent[page] for page in in_free)
        if torn or len(self._free) + self.num_used != self.num_pages:
            raise AssertionError(f"KV pages do not add up: {self._counts()}")

    def _counts(self) -> str:
        return f"{self.num_free} free + {self.num_used} used of {self.num_pages} pages"
