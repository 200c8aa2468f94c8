import numpy as np
import pytest

from hf_kvtransfer.policy import TimeModel


LENGTHS = [128, 512, 1536, 4096]


def test_finds_the_terms_again():
    true = TimeModel(0.2, 3e-3, 4e-7)
    found = TimeModel.fit(LENGTHS, [true.seconds(n) for n in LENGTHS], quadratic=True)
    assert found.constant == pytest.approx(true.constant, rel=1e-6)
    assert found.per_token == pytest.approx(true.per_token, rel=1e-6)
    assert found.per_token_squared == pytest.approx(true.per_token_squared, rel=1e-6)


def test_relative_errors_count():
    true = TimeModel(0.05, 1e-3, 2e-7)
    generator = np.random.default_rng(0)
    for _ in range(20):
        noisy = [true.seconds(n) * generator.uniform(0.9, 1.1) for n in LENGTHS]
        found = TimeModel.fit(LENGTHS, noisy, quadratic=True)
        assert all(found.seconds(n) == pytest.approx(true.seconds(n), rel=0.15) for n in LENGTHS)


def test_no_term_is_negative():
    # A line through these, and a parabola too, would be below 0 for a context of no tokens.
    found = TimeModel.fit([100, 200, 400], [0.1, 0.4, 1.6], quadratic=True)
    assert min(found.constant, found.per_token, found.per_token_squared) >= 0
    assert found.seconds(800) == pytest.approx(6.4, rel=0.01)
    falling = TimeModel.fit([100, 200, 400], [0.3, 0.2, 0.2], quadratic=False)
    assert falling.per_token == 0
    assert 0.2 < falling.constant < 0.3


def test_rows_add_their_tokens_and_not_the_constant():
    model = TimeModel(1.0, 0.1, 0.01)
    assert model.seconds(10, batch_size=3) == pytest.approx(1 + 3 * (1 + 1))


@pytest.mark.parametrize(("tokens", "seconds"), [([], []), ([1], []), ([1, 2], [0.1, 0.0])])
def test_no_measurements(tokens, seconds):
    with pytest.raises(ValueError, match="are no measurements"):
        TimeModel.fit(tokens, seconds, quadratic=True)
