"""Fine-tune a Wan video model of diffusers on a folder of clips with captions: a LoRA, or all weights.

The folder has videos (mp4, webm, mov, mkv, gif) or folders of frames. The caption of a clip is in a .txt file beside
it, in caption.txt for a whole folder, or in metadata.jsonl. Clips and captions are encoded once, by all GPUs together,
into the cache. Needs `pip install -e ".[latent]"`.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("train_wan:train", "wan_flags:WanFlags", __doc__)

from dataclasses import replace

from accelerate.utils import set_seed

from clips import find_clips
from encoded_clips import encode_clips
from rectified_flow import Callback, Trainer
from rectified_flow.cli.build import join
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import plain, recorded
from rectified_flow.flows.times import LogitNormal, TimeDistribution
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import check_start, prepare_folders, read_config
from rectified_flow.system.artifact import claim
from rectified_flow.system.terminal import line
from wan_callbacks import LORA_FILE, TRANSFORMER, LoraFile, SampledClips, write_lora, write_transformer
from wan_flags import WanFlags
from wan_flow import ClipFlow, ExpertTimes, WanNetwork
from wan_pipeline import Wan

IDENTITY = ("model", "expert", "first_frame", "lora_rank", "lora_alpha", "time_shift")
"""Flags that may not change when a run resumes: nothing in the weights would show it."""


def check_same_run(flags: WanFlags) -> None:
    """Raise a UsageError if the newest undamaged checkpoint is of a run with another model or objective."""
    now = plain(flags)
    newest = checkpoint.newest_checkpoint(flags.run.checkpoints)
    if newest is None:
        return
    then = read_config(newest / checkpoint.CONFIG_FILE)["training"]
    for name in IDENTITY:
        if then.get(name) != now[name]:
            changed = f"{newest} was trained with --{name} {then.get(name)}, and this run has {now[name]}"
            raise UsageError(f"{changed}: choose another --output_dir")


def train(flags: WanFlags) -> bool:
    """Train, and return whether the run finished."""
    state, config, run_flags = join(flags), flags.wan, flags.run
    set_seed(run_flags.seed)
    on_main(state, lambda: check_start(run_flags))
    on_main(state, lambda: check_same_run(flags))
    on_main(state, lambda: prepare_folders(run_flags))  # also recognises a copied run
    on_main(state, lambda: claim(run_flags.output_dir, [LORA_FILE if config.lora_rank else TRANSFORMER]))
    clips = find_clips(config.dataset_path)
    wan = Wan(config, state.device)
    if config.lora_rank == 0:
        wan.check_memory()
    dataset = encode_clips(wan, clips, state)
    transformer = wan.trained_transformer()
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    times: TimeDistribution = LogitNormal(mean=0.0, std=1.0, shift=wan.time_shift)
    if wan.boundary is not None:
        times = ExpertTimes(wan.time_shift, *wan.noise_range)
    flow = ClipFlow(
        WanNetwork(transformer, dataset.empty, f"{config.model}/{wan.expert}", wan.first_frame),
        space=wan.space,
        time_distribution=times,
        condition_dropout=config.caption_dropout,
    )
    if state.is_main_process:
        low, high = wan.noise_range
        print(line("times", f"logit-normal, shift {wan.time_shift:g}, {wan.expert} from {low:g} to {high:g}"))
    callbacks: list[Callback] = [LoraFile()] if config.lora_rank else []
    if run_flags.num_samples:
        count, steps, every = run_flags.num_samples, run_flags.sample_steps or 30, run_flags.sample_every
        callbacks.append(SampledClips(wan, clips, dataset, count=count, steps=steps, every=every))
    without_grid = replace(run_flags, num_samples=0)  # the pipeline samples, not the flow
    trainer = Trainer(flow, dataset, without_grid, callbacks=callbacks, flags=recorded(flags))
    finished = trainer.train()
    if finished and state.is_main_process:  # also when a finished run starts again, after a kill or a full disk
        write = write_lora if config.lora_rank else write_transformer
        write(trainer)
    return finished
