"""Small tokenizers of three kinds, trained in a moment on a few sentences."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


SENTENCES = [
    "The river carries silt from the mountains down to the delta, where farmers wait for the flood.",
    "def area(width, height):\n    return width * height  # square metres\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "日本語のテキストと絵文字 🎉 が混ざる。",
    "What does the delta give the farmers?\n\nIt gives them silt, water and fish.",
]
TEXTS = [
    "The farmers wait for the flood.",
    " leading and trailing  ",
    "tabs\tand\n\nblank lines\n\n\n",
    "日本語 と 中文 и русский",
    "🎉🎉 party 👩‍👩‍👧 family",
    "e\u0301te\u0301 and cafe\u0301, ﬁne ½",
    "def f(x):\n\treturn x ** 2  # ok",
    " ",
]


def byte_level_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>")


def unigram(*more_texts):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<bos>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*SENTENCES, *TEXTS, *more_texts], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", unk_token="<unk>")


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES + TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")
