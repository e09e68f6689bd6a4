"""Fine-tune a Wan video model of diffusers on a folder of clips with captions, as a LoRA or in full.

The folder has videos (mp4, webm, gif) or folders of frames, each with a caption in a .txt file beside it, in
caption.txt, or in metadata.jsonl. Clips and captions are encoded once, by all GPUs together, into the cache.
Needs `pip install -e ".[latent]"`.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("train_wan:train", "wan_flags:WanFlags", __doc__)

from collections.abc import Callable
from typing import Any

from accelerate.utils import set_seed

from clips import find_clips
from encoded_clips import encode_clips
from rectified_flow import Callback, Trainer
from rectified_flow.cli.build import join
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import flags_in, plain, recorded
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import read_config
from rectified_flow.runs.resume import check_start
from rectified_flow.system.terminal import line
from wan_callbacks import LoraFile, Previews, claim_lora
from wan_flags import WanFlags
from wan_flow import ClipFlow, ExpertTimes, WanNetwork
from wan_pipeline import Wan

IDENTITY = ("model", "train", "lora_rank", "lora_alpha", "noise_range", "time_shift", "first_frame")
"""Flags that may not change when a run resumes: nothing in the weights would show it."""


def check_same_run(flags: WanFlags) -> None:
    """Raise a UsageError if the newest checkpoint is of a run with another model or objective."""
    now = plain(flags)
    for newest in checkpoint.list_checkpoints(flags.run.checkpoints)[-1:]:
        then = flags_in(read_config(newest / checkpoint.CONFIG_FILE))
        for name in IDENTITY:
            if then.get(name) != now[name]:
                raise UsageError(
                    f"{newest} was trained with --{name} {then.get(name)}, but this run has {now[name]}: choose "
                    "another --output_dir"
                )


def train(flags: WanFlags) -> bool:
    """Train, and return whether the run finished."""
    state, config = join(flags), flags.wan
    set_seed(flags.run.seed)
    assert config.dataset_path is not None
    on_main(state, lambda: check_start(flags.run))
    on_main(state, lambda: check_same_run(flags))
    if config.train == "lora":
        on_main(state, lambda: claim_lora(flags.run.output_dir))
    clips, batch = find_clips(config.dataset_path), flags.run.split_batch(state.num_processes)
    if len(clips) < batch.total:
        raise UsageError(
            f"--dataset_path {config.dataset_path} has {len(clips)} clips, fewer than one global batch ({batch}): "
            "pass a smaller --batch_size"
        )
    wan = Wan(config, state.device)
    dataset = encode_clips(wan, clips, state)
    transformer: Any = wan.transformer()
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    low, high = config.noise_range
    flow = ClipFlow(
        WanNetwork(transformer, dataset.empty, f"{config.model}/{wan.expert}"),
        first_frame=config.first_frame,
        space=wan.space,
        time_distribution=ExpertTimes(wan.time_shift, low, high),
        condition_dropout=config.caption_dropout,
    )
    report: Callable[[str], object] = print if state.is_main_process else lambda _line: None
    report(line("times", f"logit-normal, shift {wan.time_shift:g}, from {low:g} to {high:g}, of {wan.expert}"))
    callbacks: list[Callback] = [LoraFile()] if config.train == "lora" else []
    if config.preview_clips and wan.boundary is not None:
        report(line("samples", "none, as sampling needs both experts"))
    elif config.preview_clips:
        callbacks.append(Previews(wan, clips, dataset, flags.run.sample_every))
    return Trainer(flow, dataset, flags.run, callbacks=callbacks, flags=recorded(flags)).train()
