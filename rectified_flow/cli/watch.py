"""watch: TensorBoard on the folder of a run, or on a folder of runs."""

from tensorboard import program

from rectified_flow.cli.flags.sampling import WatchConfig
from rectified_flow.errors import UsageError


def watch(config: WatchConfig) -> None:
    """Start TensorBoard and serve until Ctrl-C.

    Raises:
        UsageError: if no run in the folder logs to TensorBoard.
    """
    folder = config.watched.runs
    if not any(folder.rglob("events.out.tfevents*")):
        raise UsageError(f"no run in {folder} logs to TensorBoard: train with --log_with tensorboard")
    board = program.TensorBoard()
    board.configure(argv=["tensorboard", "--logdir", str(folder), "--port", str(config.watched.port)])
    board.main()
