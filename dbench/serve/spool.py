"""Lines of text kept on disk instead of in memory: a bounded number, of which the oldest go first.

They lie in files without a name in the folder for temporary files, each a segment of consecutive lines. A
whole segment is dropped at a time, and its room on disk is free once nobody reads it any more.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO

from dbench.errors import one_line

NUM_SEGMENTS = 16
"""When there are more, the oldest is dropped: so many open files, and the share of lines that goes at once."""
MAX_SEGMENT_BYTES = 64 * 1024 * 1024
"""A segment that has reached them is full, whatever its number of lines: 1 GiB on disk in all."""
READ_BYTES = 256 * 1024
"""Read at a time."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Segment:
    """Consecutive lines in one file, which is closed when its last holder lets go."""

    file: IO[bytes]
    num_lines: int = 0
    num_bytes: int = 0
    """Behind them may be the torn beginning of lines that found no room."""
    num_holders: int = 1

    def write(self, lines: Sequence[str]) -> None:
        """All of them or none. Raises OSError."""
        data = memoryview("".join(line + "\n" for line in lines).encode())
        done = 0
        while done < len(data):
            done += os.pwrite(self.file.fileno(), data[done:], self.num_bytes + done)
        self.num_lines += len(lines)
        self.num_bytes += len(data)

    def read(self, num_bytes: int) -> Iterator[str]:
        """The lines in the first `num_bytes`. Raises OSError."""
        rest, position = b"", 0
        while position < num_bytes:
            data = os.pread(self.file.fileno(), min(READ_BYTES, num_bytes - position), position)
            if not data:
                raise OSError(f"it ends after {position} of {num_bytes} bytes")
            position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line.decode()

    def hold(self) -> None:
        self.num_holders += 1

    def release(self) -> None:
        self.num_holders -= 1
        if not self.num_holders:
            self.file.close()


@dataclass(slots=True, eq=False)
class LineSpool:
    """Keeps the last lines, at most `max_lines`, in files that are opened when needed.

    A disk that is full ends the keeping until `clear`: lines from then on are counted and nothing else. `close` ends
    it for good.
    """

    max_lines: int
    num_taken: int = 0
    """Lines since the last `clear`, kept or not."""
    _segments: deque[_Segment] = field(default_factory=deque)
    _has_ended: bool = False

    @property
    def num_lines(self) -> int:
        """That are kept."""
        return sum(segment.num_lines for segment in self._segments)

    def append(self, lines: Sequence[str]) -> None:
        """Take in lines, none of which holds a newline."""
        self.num_taken += len(lines)
        if self._has_ended:
            return
        start = 0
        try:
            while start < len(lines):
                end = start + self._make_room()
                self._segments[-1].write(lines[start:end])
                start = end
        except OSError as error:
            self._has_ended = True
            logger.error("events cannot be kept any more, until the next reset of metrics: %s", one_line(error))

    def lines(self) -> Generator[str]:
        """Those that are kept at the first step of the iterator, oldest first, whatever is called meanwhile.

        Raises OSError when they cannot be read.
        """
        with ExitStack() as held:
            parts = [(segment, segment.num_bytes) for segment in self._segments]
            for segment, _ in parts:
                segment.hold()
                held.callback(segment.release)
            for segment, num_bytes in parts:
                yield from segment.read(num_bytes)

    def clear(self) -> None:
        """Forget all lines, and give back their room."""
        for segment in self._segments:
            segment.release()
        self._segments.clear()
        self.num_taken = 0
        self._has_ended = False

    def close(self) -> None:
        """Forget all lines, and keep none from now on."""
        self.clear()
        self._has_ended = True

    def _make_room(self) -> int:
        """Lines that the last segment takes now, at least one: a full one gets a successor. Raises OSError."""
        segment_lines = -(-self.max_lines // NUM_SEGMENTS)
        last = self._segments[-1] if self._segments else None
        if last is None or last.num_lines >= segment_lines or last.num_bytes >= MAX_SEGMENT_BYTES:
            last = _Segment(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  closed by its last holder
            self._segments.append(last)
            if len(self._segments) > self.max_lines // segment_lines:
                self._segments.popleft().release()
        return segment_lines - last.num_lines
