import os


# Tests run offline, whatever the machine has; what comes from PyPI is fetched by pip. Read when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from .tiny_models import tiny_model
from .tiny_tokenizers import byte_level_bpe, unigram, wordpiece


@pytest.fixture(scope="session")
def tokenizers():
    """Tokenizers that cut text differently; `unigram` adds a BOS."""
    return {"bpe": byte_level_bpe(), "unigram": unigram(), "wordpiece": wordpiece()}


@pytest.fixture(scope="module")
def gemma():
    """A tiny model with sliding windows; tests of one module share it."""
    return tiny_model("gemma3")


@pytest.fixture(scope="module")
def llama():
    """A tiny model without; tests of one module share it."""
    return tiny_model("llama")
