"""How much do captions determine? Scores of predictions from captions, for comparison with those of samples.

Ridge regression on the vectors of training captions predicts the features and the mean colour of held-out pictures. The
retrieval by predicted features is that of rectified_flow/text/caption.py. The picture of the training caption
nearest to a held-out caption is another prediction. Run with --data FOLDER, a folder with captions in ``text``.
"""

import argparse
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rectified_flow import Evaluator, ImageDataset
from rectified_flow.evaluation.agreement import ridge
from rectified_flow.evaluation.translation import found
from rectified_flow.text.caption import AMONG, NEAREST
from rectified_flow.text.encoders import BagOfWords
from studies.conditions import open_rows
from studies.training import FEATURES

SEED, IMAGE_SIZE = 0, 32


def vectors_of(training: ImageDataset, held_out: ImageDataset) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return vectors of the training captions and of the held-out captions, float64 ``[n, d]``, by name."""
    sides = (training, held_out)
    texts = [side.condition_texts(range(len(side)))["text"] for side in sides]
    values = [side.condition_values(range(len(side))) for side in sides]
    bag = BagOfWords.of(texts[0])
    words = [bag.encode(each)[:, 0].nan_to_num().double() for each in texts]
    sentences = [each["text"][:, 0].double() for each in values]
    classes = [F.one_hot(each["category"], int(values[0]["category"].max()) + 2).double() for each in values]
    both = [torch.cat(pair, dim=1) for pair in zip(sentences, words, strict=True)]
    named = {"category alone": classes, "sentence model": sentences, "words": words, "sentence model and words": both}
    return {name: (each[0], each[1]) for name, each in named.items()}


def main() -> None:
    """Print a table of scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="emoji-pairs/fluent", help="a folder, or its name in $STUDIES_DATA")
    training, held_out = open_rows(parser.parse_args().data, IMAGE_SIZE, ("text", "category"), tokens=0)
    evaluator = Evaluator(training, FEATURES, num_samples=2, seed=SEED, held_out=held_out)
    real, unseen = evaluator.real.features[0].double(), evaluator.real.held_out
    assert unseen is not None
    colours, seen = (side.read_pictures(range(len(side))).double().mean(dim=(2, 3)) for side in (held_out, training))
    count = len(unseen) // AMONG * AMONG
    groups = torch.randperm(len(unseen), generator=torch.Generator().manual_seed(SEED))[:count].unflatten(
        0, (-1, AMONG)
    )
    print(f"| captions as | retrieval at {NEAREST} of {AMONG} | by the nearest caption | R² of the mean colour |")
    print("|---|---|---|---|")
    for name, (vectors, queries) in vectors_of(training, held_out).items():
        predicted = ridge(vectors, real, queries)
        similar = F.normalize(queries, dim=1) @ F.normalize(vectors, dim=1).T
        nearest = real[similar.argmax(dim=1)]
        scores = [found(each[None, groups], unseen[groups].double(), NEAREST) for each in (predicted, nearest)]
        error = (ridge(vectors, seen, queries) - colours).square().sum()
        explained = 1 - error / (colours - seen.mean(dim=0)).square().sum()
        print(f"| {name} | {scores[0]:.0%} | {scores[1]:.0%} | {explained:.2f} |")


if __name__ == "__main__":
    main()
