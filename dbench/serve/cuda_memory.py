"""How many KV pages fit into what a CUDA device has left."""

from __future__ import annotations

from dataclasses import dataclass

from dbench.errors import OptionError


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device, once weights and the room of a pass are taken."""

    name: str
    free: int
    total: int
    utilization: float
    """The share of `total` that a worker may take."""
    reserve: int
    """Kept for graphs and libraries."""

    @property
    def share(self) -> int:
        return int(self.total * self.utilization)

    @property
    def available(self) -> int:
        """For pages; below 0 where others have taken too much."""
        return self.share - (self.total - self.free) - self.reserve


@dataclass(frozen=True, slots=True)
class PagesWanted:
    """Pages of one worker."""

    page_bytes: int
    page_size: int
    max_model_len: int
    num_sequences: int
    """At a time; pages for more canvases than these would never be used."""

    @property
    def of_a_canvas(self) -> int:
        return -(-self.max_model_len // self.page_size)


def pages_that_fit(memory: DeviceMemory, wanted: PagesWanted) -> int:
    """Pages for canvases; one more is nobody's. Raises OptionError where not even the longest canvas fits."""
    num_pages = min(memory.available // wanted.page_bytes - 1, wanted.num_sequences * wanted.of_a_canvas)
    if num_pages < wanted.of_a_canvas:
        raise OptionError(
            f"{memory.name}: {gib(max(0, memory.available))} are left for KV of the {gib(memory.share)} that "
            f"--gpu-memory-utilization {memory.utilization:g} allows, one canvas of max_model_len "
            f"{wanted.max_model_len} needs {gib((wanted.of_a_canvas + 1) * wanted.page_bytes)}; lower --max-model-len, "
            "--max-batch-size or --max-tokens-per-iteration, or free the device"
        )
    return num_pages


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
