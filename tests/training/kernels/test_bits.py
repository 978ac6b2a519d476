"""The bits that dropout is made of: the published generator, number by number, and what a fair coin shows."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

from metaphrase.modeling.dropout import dropout_from_bits, random_from

WORD, LONG = 2**32, 2**64
LANES = 8


def draw(compiled, seed: int, count: int) -> torch.Tensor:
    bits = torch.empty(count, dtype=torch.int16)
    compiled.library.draw_bits(ctypes.c_uint64(seed), count, bits.data_ptr())
    return bits


def splitmix64(state: int):
    while True:
        state = (state + 0x9E3779B97F4A7C15) % LONG
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % LONG
        z = (z ^ z >> 27) * 0x94D049BB133111EB % LONG
        yield z ^ z >> 31


def turned(x: int, by: int) -> int:
    return (x << by | x >> (32 - by)) % WORD


def xoshiro128(s: list[int]):
    """xoshiro128++ as its authors write it down."""
    while True:
        yield (turned((s[0] + s[3]) % WORD, 7) + s[0]) % WORD
        shifted = s[1] << 9 & WORD - 1
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted
        s[3] = turned(s[3], 11)


def test_splitmix64_is_the_published_one():
    """Its first numbers from 1234567, as the literature gives them."""
    numbers = splitmix64(1234567)
    assert [next(numbers) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, 2**64 - 1])
def test_number_by_number(compiled, seed):
    begun = splitmix64(seed)
    lanes = []
    for _ in range(LANES):
        pairs = [next(begun) for _ in range(2)]
        lanes.append(xoshiro128([half for pair in pairs for half in (pair % WORD, pair >> 32)]))
    wanted = [next(lane) for _ in range(100) for lane in lanes]
    found = draw(compiled, seed, 1600).view(torch.int32)
    assert [int(word) % WORD for word in found] == wanted


def test_any_count_is_the_beginning_of_a_longer_one(compiled):
    whole = draw(compiled, 7, 100)
    for count in range(1, 100):
        assert torch.equal(draw(compiled, 7, count), whole[:count])
    assert not torch.equal(draw(compiled, 8, 100), whole)


def test_every_number_comes_equally_often(compiled):
    """Chi squared over all 65,536 values, within six standard deviations."""
    count = 2**23
    seen = torch.bincount(draw(compiled, 11, count).int() + 2**15, minlength=2**16).double()
    expected = count / 2**16
    chi_squared = ((seen - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 65_535) < 6 * (2 * 65_535) ** 0.5


def test_neighbours_lanes_and_following_draws_have_nothing_to_do_with_each_other(compiled):
    rows = draw(compiled, 3, 16 * 60_000).view(-1, 16).double()
    following = draw(compiled, 4, 16 * 60_000).view(-1, 16).double()
    table = torch.corrcoef(torch.cat([rows[:-1], rows[1:], following[1:]], 1).t())
    assert (table - torch.eye(48)).abs().max() < 6 / len(rows) ** 0.5


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_as_many_are_dropped_as_torch_drops(counted, p):
    torch.manual_seed(0)
    ones = torch.ones(1000, 1000)
    found = dropout_from_bits(ones, p)
    assert counted["bits"] == 1
    deviation = (p * (1 - p) / ones.numel()) ** 0.5
    theirs = nn.functional.dropout(ones, p)
    assert abs((found == 0).float().mean() - p) < 5 * deviation + 2**-16
    assert abs((found == 0).float().mean() - (theirs == 0).float().mean()) < 8 * deviation + 2**-16
    assert found.mean().item() == pytest.approx(1, abs=6 * deviation / (1 - p))
    rows, columns = ((found != 0).float().mean(axis) for axis in (0, 1))
    for line in (rows, columns):
        assert (line - (1 - p)).abs().max() < 6 * (p * (1 - p) / 1000) ** 0.5


@pytest.mark.usefixtures("counted")
def test_they_follow_the_seed_of_torch_and_of_a_thread():
    inputs = torch.ones(200)

    def masks(begin):
        begin()
        return [dropout_from_bits(inputs, 0.5) for _ in range(3)]

    first, second = masks(lambda: torch.manual_seed(5)), masks(lambda: torch.manual_seed(5))
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], masks(lambda: torch.manual_seed(6))[0])
    before = torch.get_rng_state()
    with random_from(torch.Generator().manual_seed(5)):
        other = dropout_from_bits(inputs, 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(other, first[0])
