"""One end of a KV transfer as a process of its own, for tests that kill or stop it in the middle.

`python -m tests.serve.transfer_peer ADDRESS EPOCH TIMEOUT_S send|receive`: says "loaded", then meets its peer, says
"here" once something has crossed the link, and then waits. As a sender it leaves its block half sent; as a receiver
it reads one message and no more.
"""

from __future__ import annotations

import sys
import time

import torch

from dbench.models import embedded_directory
from dbench.serve.channel import RECEIVER, SENDER, MeetingPoint, meet
from dbench.serve.families import read_model_config

MODEL = read_model_config(embedded_directory())
PAGE_SIZE = 4
KEY = {"request_id": "a", "block_index": 0, "attempt": 0}


def main() -> None:
    address, epoch, timeout_s, role = sys.argv[1:]
    print("loaded", flush=True)
    rank = SENDER if role == "send" else RECEIVER
    meeting = MeetingPoint(address, float(timeout_s), torch.device("cpu"))
    channel = meet(meeting, f"kv-{epoch}", rank)
    if role == "send":
        num_bytes = 2 * PAGE_SIZE * MODEL.n_kv_heads * MODEL.head_dim * 4
        channel.send({"kind": "layer", "key": KEY, "layer": 0, "num_pages": 1})
        channel.bulk.send(torch.zeros(num_bytes, dtype=torch.uint8))
        channel.send({"kind": "layer", "key": KEY, "layer": 1, "num_pages": 1})  # and no layer after it
    else:
        channel.receive()
    print("here", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
