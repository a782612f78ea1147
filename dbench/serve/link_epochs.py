"""Which link two workers exchange KV over."""

from __future__ import annotations


class LinkEpochs:
    """Numbers of the links over which pairs of workers exchange KV; after a failure a pair gets a new one."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[int, int], int] = {}
        self._num_given = 0

    def of(self, sender_id: int, receiver_id: int) -> int:
        """The current one of a pair; no two pairs ever have the same."""
        pair = (sender_id, receiver_id)
        if pair not in self._epochs:
            self._num_given += 1
            self._epochs[pair] = self._num_given
        return self._epochs[pair]

    def end(self, epoch: int) -> None:
        """This link has failed."""
        self._epochs = {pair: current for pair, current in self._epochs.items() if current != epoch}

    def end_all_of(self, worker_id: int) -> None:
        """The worker has gone, and with it its links."""
        self._epochs = {pair: current for pair, current in self._epochs.items() if worker_id not in pair}
