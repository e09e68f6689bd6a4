"""The data of a run, open: pictures or items, their rows as the space stores them, and the rows that are held out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState

from rectified_flow.cli.data import build_space
from rectified_flow.cli.distill import DistillationData
from rectified_flow.cli.planning.limits import MIN_TO_HOLD_OUT, proposed_share
from rectified_flow.cli.training_flags import DataConfig
from rectified_flow.condition import ConditionSpecs
from rectified_flow.data.description import PictureData, RunData, with_sources
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed import check_equal, on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.heldout import Split, hold_out
from rectified_flow.spaces.space import Space
from rectified_flow.system.terminal import line


@dataclass(frozen=True)
class OpenData:
    """The data of a run, open on all processes.

    Args:
        description: the description of the data.
        items: pictures with their columns and sources, or the items of a registered dataset.
        rows: the items as the space stores them; the items themselves before the space or a teacher has stored rows,
            and if latents are encoded in each step.
        space: the space of the rows.
        split: the rows on either side of the split, if some are held out.
        choices: sentences about settings that the run chose by the pictures when it began.
    """

    description: RunData
    items: Any
    rows: Any
    space: Space
    split: Split | None = None
    choices: Sequence[str] = ()

    @property
    def count(self) -> int:
        """Number of items to train on."""
        return len(self.items) if self.split is None else len(self.split.training)

    @property
    def conditions(self) -> ConditionSpecs:
        """The conditions of the items."""
        conditions: ConditionSpecs = getattr(self.items, "conditions", {})
        return conditions

    @property
    def lacks_held_out(self) -> bool:
        """Whether the run cannot measure a loss on held-out pictures, since there are too few pictures for it."""
        if self.split is not None or not isinstance(self.description, PictureData):
            return False
        return self.count < MIN_TO_HOLD_OUT or self.description.holdout > 0

    def divide(self, dataset: Any) -> tuple[Any, Any]:
        """Return the training part of the items or of the rows, and the held-out part or None."""
        return (dataset, None) if self.split is None else self.split.divide(dataset)


def open_data(
    description: RunData,
    found: Any,
    flags: DataConfig,
    distilled: DistillationData | None,
    *,
    choices: Sequence[str] = (),
    split_is_given: bool,
    stops: bool,
    recorded: Space | None,
    stores: bool,
) -> OpenData:
    """Read the data, hold some of them out, and store them as their space needs them. Collective.

    Args:
        description: the description of the data.
        found: the files of the data, or another dataset.
        flags: the flags of the pictures.
        distilled: the data of a teacher, if there is one. They are generated later, and nothing is held out of them.
        choices: sentences about settings that the run chose by the pictures.
        split_is_given: whether the user gave the share to hold out.
        stops: whether the run stops when it memorises.
        recorded: the space that the run has recorded, if it has begun.
        stores: whether the rows are stored in the form of their space, which takes long for latents.
    """
    state = PartialState()
    items: Any = description.open(found)
    if len(items) == 0:
        raise UsageError(f"--dataset {description.name} has no items: pass another dataset")
    if description.has_pictures:  # different numbers of pictures would desynchronise the processes
        counted = {"the number of pictures": len(items), "their fingerprint": items.fingerprint}
        check_equal(state, lambda: counted)
    teacher = None if distilled is None else on_main(state, distilled.space_of_teacher)
    space = build_space(flags, items, teacher)
    split = None
    if isinstance(description, PictureData) and distilled is None:
        split = hold_out_pictures(items, description.holdout, description.seed, is_given=split_is_given, stops=stops)
    items = with_sources(items, description, space)
    if distilled is not None or not stores:
        return OpenData(description, items, items, space, split, choices)
    rows, space = space.medium.rows(items, mirrored=flags.horizontal_flip, recorded=recorded)
    return OpenData(description, items, rows, space, split, choices)


def hold_out_pictures(pictures: ImageDataset, share: float, seed: int, *, is_given: bool, stops: bool) -> Split | None:
    """Return the split of the pictures, or None if nothing is held out. Collective.

    Args:
        pictures: the pictures.
        share: the share to hold out; 0 for none.
        seed: the seed of the split.
        is_given: whether the user gave the share. A failed split is then an error, and otherwise a printed line.
        stops: whether the run stops when it memorises, for which it needs held-out pictures.
    """
    state = PartialState()
    if not share:
        if stops:
            needed = f"pass --holdout {proposed_share(len(pictures)):g}"
            raise UsageError(f"--stop_when_memorising needs pictures to measure on: {needed}")
        if len(pictures) < MIN_TO_HOLD_OUT and not is_given:
            text = f"none of {len(pictures)} pictures, as too few would be left"
            state.print(line("held out", text))
        return None
    split = hold_out(pictures, share, seed)
    if split.problem is not None:
        if is_given or stops:
            raise UsageError(f"--holdout {share:g} leaves {split.problem}: change it, or pass --holdout 0")
        state.print(line("held out", f"nothing, as --holdout {share:g} leaves {split.problem}"))
        return None
    state.print(line("held out", split))
    return split
