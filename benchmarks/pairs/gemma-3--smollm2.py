"""
Gemma 3 to SmolLM2: the way back. The source has sliding windows and the coarser tokens.

    python benchmarks/pairs/gemma-3--smollm2.py DATA
"""

from made_models import GEMMA, SMOLLM2, demo
from measuring import main


if __name__ == "__main__":
    main(
        __doc__,
        demo(GEMMA),
        demo(SMOLLM2),
        {
            "45MB": {"budget": "45MB"},
            "all-layers": {"num_source_layers": 18},
            "45MB-native-3": {"budget": "45MB", "native_layers": 3},
        },
    )
