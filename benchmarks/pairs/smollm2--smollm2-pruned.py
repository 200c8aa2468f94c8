"""
SmolLM2 to a SmolLM2 with fewer layers: the same tokens, another depth.

    python benchmarks/pairs/smollm2--smollm2-pruned.py DATA

The first time the layers that change least are dropped, and the rest is healed by a LoRA, some minutes, and merged.
"""

from made_models import SMOLLM2, demo, smollm2_pruned
from measuring import main


if __name__ == "__main__":
    main(
        __doc__,
        demo(SMOLLM2),
        smollm2_pruned,
        {
            "identity-rank-64": {"kind": "identity", "native_layers": None, "rank": 64},
            "linear-28MB": {"budget": "28MB"},
            "linear-28MB-native-3": {"budget": "28MB", "native_layers": 3},
        },
    )
