"""KV pages get what is left of a device's share, never less than a canvas and never more than are of use."""

from __future__ import annotations

import pytest

from dbench.errors import OptionError
from dbench.serve.cuda_memory import DeviceMemory, PagesWanted, pages_that_fit

WANTED = PagesWanted(page_bytes=1000, page_size=16, max_model_len=100, num_sequences=64)  # 7 pages a canvas


def memory(free: int) -> DeviceMemory:
    return DeviceMemory("cuda:0", free, total=1_000_000, utilization=0.9, reserve=50_000)


def test_pages_take_what_is_free_of_the_share_less_the_reserve_and_a_page_of_nobody() -> None:
    assert pages_that_fit(memory(free=400_000), WANTED) == 249  # 900,000 - 600,000 - 50,000, less one page


def test_more_pages_than_all_sequences_can_hold_are_of_no_use() -> None:
    few = PagesWanted(page_bytes=1000, page_size=16, max_model_len=100, num_sequences=3)
    assert pages_that_fit(memory(free=400_000), few) == 21


@pytest.mark.parametrize("free", [0, 157_999])
def test_a_device_without_room_for_one_canvas_is_refused_with_what_to_lower(free: int) -> None:
    with pytest.raises(OptionError, match=r"^cuda:0: .* one canvas of max_model_len 100 needs .*--max-model-len"):
        pages_that_fit(memory(free), WANTED)
    assert pages_that_fit(memory(158_000), WANTED) == 7
