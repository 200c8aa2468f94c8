"""
SmolLM2 to Gemma 3: another tokenizer, other depth, other shapes, sliding windows in the target.

    python benchmarks/pairs/smollm2--gemma-3.py DATA
"""

from made_models import GEMMA, SMOLLM2, demo
from measuring import main


if __name__ == "__main__":
    main(
        __doc__,
        demo(SMOLLM2),
        demo(GEMMA),
        {
            "45MB": {"budget": "45MB"},
            "10MB": {"budget": "10MB", "storage_bits": 8},
            "45MB-native-3": {"budget": "45MB", "native_layers": 3},
        },
    )
