"""
SmolLM2 to a fine-tuned SmolLM2: a new version of a model reads what the old one has read.

    python benchmarks/pairs/smollm2--smollm2-finetuned.py DATA

The first time a LoRA is trained on the word problems among the calibration text, some minutes, and merged.
"""

from made_models import SMOLLM2, demo, smollm2_finetuned
from measuring import main


if __name__ == "__main__":
    main(
        __doc__,
        demo(SMOLLM2),
        smollm2_finetuned,
        {
            "as-it-is": {"kind": "identity", "native_layers": None},
            "identity-rank-16": {"kind": "identity", "native_layers": None, "rank": 16},
            "identity-rank-64": {"kind": "identity", "native_layers": None, "rank": 64},
            "linear-35MB": {"budget": "35MB"},
        },
    )
