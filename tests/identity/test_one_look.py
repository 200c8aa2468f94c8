"""Within one handoff a model is looked at once; a look is never older than its handoff."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_kvtransfer.identity.one_look import looked_at_once, one_look


class Model:
    pass


def test_a_look_lasts_as_long_as_its_block_and_is_of_one_thread():
    looks = []
    look = looked_at_once(lambda model: looks.append(model) or len(looks))
    one, other = Model(), Model()
    assert [look(one), look(one)] == [1, 2]
    with one_look():
        assert [look(one), look(one), look(other), look(other)] == [3, 3, 4, 4]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(look, one).result() == 5
    assert look(one) == 6


def test_it_ends_with_an_error():
    looks = []
    look = looked_at_once(lambda model: looks.append(model) or len(looks))
    model = Model()
    with pytest.raises(RuntimeError), one_look():
        look(model)
        raise RuntimeError
    assert [look(model), look(model)] == [2, 3]
