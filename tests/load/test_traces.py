"""Profiles draw the lengths of their source; files give their rows."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from dbench.errors import TraceError
from dbench.load.traces import PROFILES, LengthPair, open_trace, read_csv_trace, traces_dir

NUM_DRAWS = 20_000


def draws(name: str, count: int, *, seed: int = 3, shuffle: bool = True) -> list[LengthPair]:
    return list(islice(open_trace(name).pairs(np.random.default_rng(seed), shuffle=shuffle), count))


def table(name: str) -> np.ndarray:
    return np.array([(pair.prompt_len, pair.gen_len) for pair in draws(name, NUM_DRAWS)])


def source_quantile(name: str, q: str, column: str) -> float:
    with (traces_dir() / f"{name}.quantiles.csv").open() as file:
        return next(float(row[column]) for row in csv.DictReader(file) if row["q"] == q)


def trace_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("q", ["0.5", "0.9"])
def test_a_profile_keeps_the_quantiles_of_its_source(name: str, q: str) -> None:
    drawn = np.quantile(table(name), float(q), axis=0)
    wanted = [source_quantile(name, q, "prompt_len"), source_quantile(name, q, "gen_len")]
    assert drawn == pytest.approx(wanted, rel=0.06)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_keeps_the_rank_correlation_of_its_source(name: str) -> None:
    ranks = table(name).argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    assert np.asarray(np.corrcoef(ranks.T))[0, 1] == pytest.approx(PROFILES[name].spearman, abs=0.06)


@pytest.mark.parametrize("name", ["arxiv", "sharegpt"])
def test_pairs_outside_the_limit_are_never_drawn(name: str) -> None:
    drawn = table(name)
    assert drawn[:, 1].max() <= 512
    assert drawn.sum(axis=1).max() <= 4096


@pytest.mark.parametrize("name", PROFILES)
def test_lengths_are_whole_and_positive(name: str) -> None:
    assert all(isinstance(n, int) and n >= 1 for p in draws(name, 2000) for n in (p.prompt_len, p.gen_len))


@pytest.mark.parametrize("name", PROFILES)
def test_the_same_seed_draws_the_same_pairs_and_another_seed_others(name: str) -> None:
    assert draws(name, 300) == draws(name, 300)
    assert draws(name, 300) != draws(name, 300, seed=4)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_says_where_its_figures_come_from(name: str) -> None:
    (note,) = open_trace(name).notes
    assert PROFILES[name].source in note
    assert "another model's tokens" in note


def test_the_arxiv_marginals_of_two_draws_of_a_seed_do_not_depend_on_how_many_are_taken() -> None:
    assert draws("arxiv", 900)[:100] == draws("arxiv", 100)


def test_a_file_is_taken_in_file_order_and_again_from_the_start(tmp_path: Path) -> None:
    path = trace_file(tmp_path, "prompt_len,gen_len\n10,1\n20,2\n30,3\n")
    pairs = draws(str(path), 7, shuffle=False)
    assert [p.prompt_len for p in pairs] == [10, 20, 30, 10, 20, 30, 10]
    assert open_trace(str(path)).num_rows == 3


def test_a_shuffled_file_uses_every_row_before_it_uses_one_again(tmp_path: Path) -> None:
    path = trace_file(tmp_path, "prompt_len,gen_len\n" + "".join(f"{n},1\n" for n in range(1, 51)))
    prompt_lens = [p.prompt_len for p in draws(str(path), 100)]
    assert sorted(prompt_lens[:50]) == sorted(prompt_lens[50:]) == list(range(1, 51))
    assert prompt_lens[:50] != list(range(1, 51))
    assert prompt_lens[:50] != prompt_lens[50:]


def test_a_file_may_have_more_columns_in_any_order_and_blank_lines(tmp_path: Path) -> None:
    path = trace_file(tmp_path, '\ufeffsession_id, gen_len ,note,prompt_len\ns1,7,"a,b",70\n\n,8,,80\n')
    assert read_csv_trace(path).rows == (LengthPair(70, 7), LengthPair(80, 8))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"trace\.csv: no header in line 1, wanted a CSV file that begins with prompt_len,gen_len$"),
        ("prompt_len,generated\n1,2\n", r"line 1: no column gen_len, got prompt_len,generated$"),
        ("prompt_len,gen_len\n", r"no rows under the header"),
        ("prompt_len,gen_len\n5,5\n5,many\n", r"line 3: gen_len is 'many', wanted a whole number above 0"),
        ("prompt_len,gen_len\n5,1.5\n", r"line 2: gen_len is '1.5'"),
        ("prompt_len,gen_len\n0,5\n", r"line 2: prompt_len is '0'"),
        ("prompt_len,gen_len\n5,-5\n", r"line 2: gen_len is '-5'"),
        ("prompt_len,gen_len\n5,²\n", r"line 2: gen_len is '²'"),
        ("prompt_len,gen_len\n5\n", r"line 2: 1 cells, wanted 2"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = trace_file(tmp_path, text)
    with pytest.raises(TraceError, match=complaint) as caught:
        open_trace(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(TraceError, match="cannot be read as CSV"):
        open_trace(str(path))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TraceError, match=r"unknown trace 'arxvi'.*did you mean 'arxiv'.*azure-code.*no file"):
        open_trace("arxvi")
