"""Random numbers that depend on what they are for and on nothing else: Philox-4x32-10.

The generator is a function of a 64-bit key and a 128-bit counter (Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). Key = request seed, low word first; counter = (token // 4, canvas position,
step within the block, tag). So a draw is the same in any batch, on any worker and device, in any order.

Words are int64 tensors with values below 2^32. Shapes: R rows, V tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
WORDS_PER_DRAW = 4


class Tag(IntEnum):
    """The last counter word: what the draw decides."""

    TOKEN = 0
    COUNT = 1
    CHOICE = 2


@dataclass(frozen=True, slots=True)
class DrawKeys:
    """What the draws of each row hang on, as int64 tensors of one shape."""

    seed: Tensor
    position: Tensor
    step: Tensor

    def rows(self, index: Tensor | slice) -> DrawKeys:
        return DrawKeys(self.seed[index], self.position[index], self.step[index])


Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds over counters and keys of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # 32 x 32 bits can exceed int64: the product wraps, and its 64 bits are right all the same.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & WORD) ^ c1 ^ k0, p1 & WORD, (p0 >> 32 & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = k0 + KEY_INCREMENTS[0] & WORD, k1 + KEY_INCREMENTS[1] & WORD
    return c0, c1, c2, c3


def words(keys: DrawKeys, quarter: Tensor, tag: Tag) -> Words:
    """The four words at counter (quarter, position, step, tag); `quarter` broadcasts against the keys."""
    tags = torch.full((), int(tag), dtype=torch.int64, device=quarter.device)
    return philox((quarter, keys.position, keys.step, tags), (keys.seed & WORD, keys.seed >> 32 & WORD))


def word(keys: DrawKeys, tag: Tag) -> Tensor:
    """One word per row, for decisions that are not about a token."""
    return words(keys, torch.zeros_like(keys.position), tag)[0]


def token_noise(keys: DrawKeys, first_token: int, num_tokens: int) -> Tensor:
    """Gumbel noise of tokens first_token .. first_token + num_tokens - 1 for every row: float32 [R, num_tokens].

    `first_token` is a multiple of 4: one draw serves four tokens, token t taking word t % 4 of draw t // 4.
    """
    assert first_token % WORDS_PER_DRAW == 0, f"first token {first_token} is no multiple of {WORDS_PER_DRAW}"
    first, end = first_token // WORDS_PER_DRAW, -(-(first_token + num_tokens) // WORDS_PER_DRAW)
    quarters = torch.arange(first, end, device=keys.seed.device)
    columns = DrawKeys(keys.seed.unsqueeze(1), keys.position.unsqueeze(1), keys.step.unsqueeze(1))
    drawn_RV = torch.stack(words(columns, quarters, Tag.TOKEN), dim=-1).flatten(1)
    return gumbel(drawn_RV[:, :num_tokens])


def gumbel(drawn: Tensor) -> Tensor:
    """-log(-log1p(-u)) with u = (x + 0.5) / 2^32 in float32, finite for every word x.

    For the last 128 words u would round to 1 and the noise to minus infinity; u is therefore kept at or below the
    largest float32 under 1 (1 - 2^-24), where the noise is -2.81. The noise stays within -2.81 .. 22.87; the large
    values, which decide, come from small u, where float32 is exact to 24 bits.
    """
    u = drawn.float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()
