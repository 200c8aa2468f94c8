import os


# Tests run offline, whatever the machine has; what comes from PyPI is fetched by pip. Read when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from .tiny_tokenizers import byte_level_bpe, unigram, wordpiece


@pytest.fixture(scope="session")
def tokenizers():
    """Tokenizers that cut text differently; `unigram` adds a BOS."""
    return {"bpe": byte_level_bpe(), "unigram": unigram(), "wordpiece": wordpiece()}
