from __future__ import annotations

import json

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ratios import Ratio, bootstrap_interval, paired_ratio

positive = st.floats(min_value=1e-3, max_value=1e3)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=12))
def test_paired_ratio_is_taken_within_the_round(pairs):
    values, base = zip(*pairs, strict=True)
    ratio = paired_ratio(values, base)
    expected = numpy.array(values) / numpy.array(base)
    assert ratio.min == expected.min() and ratio.max == expected.max()
    assert ratio.median == pytest.approx(numpy.median(expected), rel=1e-12)
    assert ratio.min <= ratio.ci95[0] <= ratio.ci95[1] <= ratio.max


@pytest.mark.parametrize("count", [9, 30])
def test_interval_is_that_of_a_bootstrap_by_numpy(count):
    values = numpy.random.default_rng(count).lognormal(sigma=0.2, size=count)
    draws = numpy.random.default_rng(1).choice(values, size=(20000, count))
    expected = numpy.quantile(numpy.median(draws, axis=1), [0.025, 0.975])
    assert bootstrap_interval(values.tolist()) == pytest.approx(expected, rel=0.02)


def test_interval_repeats_and_follows_its_level():
    values = [1.0, 1.1, 0.9, 1.3, 0.8, 1.05, 0.95]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    wide, narrow = bootstrap_interval(values, level=0.99), bootstrap_interval(values, level=0.5)
    assert wide[0] <= narrow[0] <= narrow[1] <= wide[1] and wide != narrow


def test_a_base_against_itself_is_one():
    ratio = paired_ratio([0.3, 0.5], [0.3, 0.5])
    assert ratio == Ratio(1.0, 1.0, 1.0, (1.0, 1.0)) and ratio.contains(1.0)
    assert json.loads(json.dumps(ratio.to_json())) == {"min": 1.0, "median": 1.0, "max": 1.0, "ci95": [1.0, 1.0]}


def test_rounds_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="equally many rounds"):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        paired_ratio([], [])
