"""A tiny text encoder of transformers, written without a download."""

from pathlib import Path
from typing import Any

from rectified_flow.text.encoders import PretrainedTextEncoder

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
WORDS = ["a", "the", "red", "blue", "green", "big", "small", "two", "heart", "star", "flower", "cat", "dog"]
WORDS += ["in", "and", ",", ".", "!", "##s"]


def write_encoder(folder: Path) -> Path:
    """Write a BERT with random weights and 16 channels, and a tokenizer in WordPiece, and return its folder."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    more: dict[str, Any] = {"num_attention_heads": 2, "max_position_embeddings": 12, "initializer_range": 0.5}
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes, **more)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names: dict[str, Any] = SPECIAL
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=12, **names).save_pretrained(folder)
    return folder


def tiny_encoder(folder: Path) -> PretrainedTextEncoder:
    """Return the encoder of :func:`write_encoder`."""
    return PretrainedTextEncoder(str(write_encoder(folder)))
