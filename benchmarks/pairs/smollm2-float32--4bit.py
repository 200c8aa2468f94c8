"""
SmolLM2 in float32 to the same checkpoint in 4 bits of bitsandbytes: does the better cache help the smaller model?

    python benchmarks/pairs/smollm2-float32--4bit.py DATA

A gap recovered of more than 1 says that it does. Needs `pip install bitsandbytes`.
"""

from made_models import SMOLLM2, demo, smollm2_4bit
from measuring import main


if __name__ == "__main__":
    main(
        __doc__,
        demo(SMOLLM2),
        smollm2_4bit,
        {
            "as-it-is": {"kind": "identity", "native_layers": None},
            "identity-rank-16": {"kind": "identity", "native_layers": None, "rank": 16},
            "identity-rank-64": {"kind": "identity", "native_layers": None, "rank": 64},
        },
    )
