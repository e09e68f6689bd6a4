"""The model: a BERT of transformers and its loss on masked tokens."""

import torch
from torch import Tensor, nn

from rectified_flow import randomness, register

PADDING, UNKNOWN, MASK = SPECIAL = ("[PAD]", "[UNK]", "[MASK]")
"""Tokens 0, 1 and 2 of any tokenizer."""
MASKED, MASKED_BY_MASK, MASKED_BY_ANY = 0.15, 0.8, 0.1
"""Shares of the chosen tokens, and of their replacements (Devlin et al. 2018, arXiv:1810.04805, section 3.1)."""
HEAD = 32


@register
class MaskedModel(nn.Module):
    """A BERT that predicts masked tokens; ``forward`` is its loss.

    Args:
        vocabulary: number of different tokens.
        length: tokens of a line.
        width: channels of a token, a multiple of 32.
        layers: number of attention layers.
    """

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        self.vocabulary, self.length, self.width, self.layers = vocabulary, length, width, layers
        self.network: BertForMaskedLM = BertForMaskedLM(
            BertConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=width // HEAD,
                intermediate_size=4 * width,
                max_position_embeddings=length,
                pad_token_id=0,
                tie_word_embeddings=False,
                hidden_dropout_prob=0.0,  # torch's dropout would depend on the number of processes
                attention_probs_dropout_prob=0.0,
            )
        )
        self.network.cls.predictions.bias.requires_grad_(False)  # used with tied embeddings only

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean over lines ``[b, length]`` of the mean over their masked tokens.

        Ranks have equal numbers of lines, but not of masked tokens: only a mean over lines is the same on any number
        of processes.
        """
        hidden, chosen = self.mask(tokens)
        losses = nn.functional.cross_entropy(self.predict(hidden).mT, tokens, reduction="none")
        return ((losses * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)).mean()

    def predict(self, hidden: Tensor) -> Tensor:
        """Return logits ``[b, length, vocabulary]``; padding is not attended to."""
        logits: Tensor = self.network(input_ids=hidden, attention_mask=(hidden > 0).long()).logits
        return logits.float()

    def mask(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens with some of them replaced, and the mask of the chosen ones, both ``[b, length]``."""
        chance, other = (randomness.rand(name, tokens.shape, tokens.device) for name in ("chosen", "replaced"))
        any_token = randomness.randint("any token", self.vocabulary - 1, tokens.shape, tokens.device) + 1
        chosen = (chance < MASKED) & (tokens > 0)
        mask = torch.full_like(tokens, SPECIAL.index(MASK))
        replaced = torch.where(other < MASKED_BY_MASK, mask, tokens)
        replaced = torch.where(other > 1 - MASKED_BY_ANY, any_token, replaced)
        return torch.where(chosen, replaced, tokens), chosen
