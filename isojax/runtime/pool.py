"""Pages of a key-value cache: which belong to whom. Page 0 belongs to nobody and takes writes of padding rows."""

from __future__ import annotations

from isojax.errors import InputError


class Pool:
    """Hands out pages in ascending order. Raises InputError when none is left."""

    def __init__(self, pages: int, page: int):
        self.page, self.free = page, list(range(pages - 1, 0, -1))
        self.owned: dict[int, list[int]] = {}

    def grow(self, request: int, tokens: int) -> list[int]:
        """Pages of `request` after it has been given enough for `tokens` tokens."""
        pages = self.owned.setdefault(request, [])
        while len(pages) * self.page < tokens:
            if not self.free:
                raise InputError(f"the cache is full at request {request}; give the runtime more pages")
            pages.append(self.free.pop())
        return pages

    def release(self, request: int) -> None:
        self.free += reversed(self.owned.pop(request, []))
