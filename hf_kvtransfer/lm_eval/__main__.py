"""
`python -m hf_kvtransfer.lm_eval run --model hf-kvtransfer ...`: lm-eval's own command, in which the model is known.

Versions of lm-eval after 0.4.13 find it by its entry point, so that `lm-eval run --model hf-kvtransfer` is enough.
"""

from lm_eval.__main__ import cli_evaluate

from . import model  # noqa: F401  (registers it)


if __name__ == "__main__":
    cli_evaluate()
