"""Where this library keeps what it has made once for a machine."""

import os
from pathlib import Path


HOME_VARIABLE = "HF_KVTRANSFER_HOME"


def home_folder() -> Path:
    """`$HF_KVTRANSFER_HOME`, or `~/.cache/hf-kvtransfer` when that is not set."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.cache/hf-kvtransfer").expanduser()
