"""The demonstration behind `make demo`: a GPT trained twice, the second time with a node killed.

Both runs train on the Python standard library's sources, byte by byte, on two virtual nodes of two
ranks (pipeline 2, data 2) with a third node as spare, on the CPU. Data-parallel peers are on
different nodes. Exit code 0 only if every loss and every final parameter is the same in every bit.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.demo_plot import draw  # noqa: E402
from tools.demo_report import RunRecord, differences, read_run, rows_to_show, table  # noqa: E402

NUM_SLOTS = 4
CORPUS_BYTES = 2_000_000
POLL_S = 0.2


class DemoError(Exception):
    """A step failed; the text says which and where to look."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    started = time.monotonic()
    print(
        "A GPT on 2 nodes x 2 ranks (pipeline 2, data 2), a third node as spare; trained twice.\n"
        "Losses and parameters must come out the same in every bit.\n"
    )
    try:
        data = build_data(args.output_dir / "data")
        peace = train("1/2 in peace", args.output_dir / "peace", data, args, inject=None)
        fault = f"kill-node={args.kill_node}@iteration={args.kill_iteration},phase=backward"
        failure = train("2/2 with failure", args.output_dir / "failure", data, args, inject=fault)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the job was ended", file=sys.stderr)
        return 128 + signal.SIGINT
    found = report(peace, failure, args)
    print(f"{time.monotonic() - started:.0f} s in all")
    return 1 if found else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--output-dir", type=Path, default=Path("demo-out"))
    parser.add_argument("--train-iters", type=int, default=40)
    parser.add_argument("--kill-iteration", type=int, default=20)
    parser.add_argument("--kill-node", type=int, default=1, choices=(0, 1))
    parser.add_argument("--time-limit", type=float, default=600, help="seconds a training may take")
    args = parser.parse_args(argv)
    if not 1 <= args.kill_iteration <= args.train_iters:
        parser.error(f"--kill-iteration {args.kill_iteration}: 1 to {args.train_iters} fit")
    args.output_dir = args.output_dir.resolve()
    return args


def corpus_files() -> list[Path]:
    """Modules of the standard library in the order of their names, up to CORPUS_BYTES."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    chosen: list[Path] = []
    num_bytes = 0
    for file in sorted(folder.glob("*.py")):
        if num_bytes + file.stat().st_size <= CORPUS_BYTES:
            chosen.append(file)
            num_bytes += file.stat().st_size
    if num_bytes < CORPUS_BYTES // 10:
        raise DemoError(f"{folder} holds too little of the standard library's sources to train on")
    return chosen


def build_data(folder: Path) -> Path:
    """Preprocess the corpus; returns the prefix for --data-path."""
    files = corpus_files()
    size = sum(file.stat().st_size for file in files) / 1e6
    print(f"data: {len(files)} modules of Python's standard library, {size:.1f} MB ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input"]
    command += [*map(str, files), "--input-format", "text", "--append-eod"]
    command += ["--tokenizer-type", "ByteTokenizer", "--output-prefix", str(folder / "stdlib")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"preprocessing failed:\n{done.stderr.strip()}")
    return folder / "stdlib_text_document"


FLAGS = """
    --deadpool
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping
    --use-distributed-optimizer --transformer-impl local --distributed-backend gloo
    --num-layers 4 --hidden-size 96 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 8 --global-batch-size 32
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 4
    --weight-decay 0.1 --clip-grad 1.0 --seed 1234
    --tokenizer-type ByteTokenizer --split 100,0,0 --eval-iters 0 --log-interval 1
"""
"""Pipeline neighbours share a node (tp-pp-dp order), so data-parallel peers do not."""


def training_command(
    log_dir: Path, data: Path, args: argparse.Namespace, inject: str | None
) -> list[str]:
    """A Megatron command line behind DEADPOOL's launcher."""
    launch = "-m deadpool launch --nodes 3 --ranks-per-node 2 --spare-nodes 1"
    command = [sys.executable, *launch.split(), str(ROOT / "pretrain_gpt.py"), *FLAGS.split()]
    command += ["--train-iters", str(args.train_iters), "--deadpool-log-dir", str(log_dir)]
    command += ["--data-path", str(data), "--data-cache-path", str(data.parent / "cache")]
    if inject is not None:
        command += ["--deadpool-inject", inject]
    return command


def train(
    title: str, folder: Path, data: Path, args: argparse.Namespace, *, inject: str | None
) -> RunRecord:
    """Run one training to its end, showing its losses as they come."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "training.log"
    started = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            training_command(folder, data, args, inject),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            _watch(process, title, folder, args, started)
        finally:
            _end(process)
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise DemoError(f"{title}: exit code {process.returncode}; the end of {log}:\n{tail}")
    return read_run(folder)


def _watch(
    process: subprocess.Popen[bytes],
    title: str,
    folder: Path,
    args: argparse.Namespace,
    started: float,
) -> None:
    meter = Meter(title, args.train_iters)
    num_swaps = 0
    while process.poll() is None:
        time.sleep(POLL_S)
        elapsed = time.monotonic() - started
        run = read_run(folder)
        for swap in run.swaps[num_swaps:]:
            meter.say(f"      swap: {swap}")
        num_swaps = len(run.swaps)
        meter.show(run, elapsed)
        if elapsed > args.time_limit:
            raise DemoError(f"{title}: not done after {elapsed:.0f} s; see {folder}/training.log")
    meter.show(read_run(folder), time.monotonic() - started, last=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end its job, if it still runs; it then takes its processes along."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Meter:
    """Progress of a run: one line that renews itself on a terminal, else a line now and then."""

    def __init__(self, title: str, num_iterations: int) -> None:
        self._title = title
        self._num_iterations = num_iterations
        self._live = sys.stdout.isatty()
        self._next = 0
        self._shown = -1

    def say(self, text: str) -> None:
        """A line of its own above the renewing one."""
        print(("\r\x1b[K" if self._live else "") + text, flush=True)

    def show(self, run: RunRecord, elapsed_s: float, last: bool = False) -> None:
        done = max(run.losses, default=0)
        loss = f"loss {run.losses[done].value:.4f}" if done else "starting"
        text = (
            f"{self._title}: iteration {done:>3}/{self._num_iterations}  {loss}  {elapsed_s:.0f} s"
        )
        if self._live:
            print(f"\r\x1b[K{text}", end="\n" if last else "", flush=True)
        elif done >= self._next or (last and done > self._shown):
            print(text, flush=True)
            self._shown = done
            self._next = done + max(1, self._num_iterations // 4)


def report(peace: RunRecord, failure: RunRecord, args: argparse.Namespace) -> list[str]:
    """Print the comparison and draw the picture. Returns what differs."""
    num_iterations = args.train_iters
    found = differences(peace, failure, num_iterations=num_iterations, num_slots=NUM_SLOTS)
    full = args.output_dir / "losses.txt"
    full.write_text(table(peace, failure, range(1, num_iterations + 1)) + "\n")
    print(f"\n{table(peace, failure, rows_to_show(peace, failure, num_iterations))}\n")
    for swap in failure.swaps:
        print(f"swap: {swap}")
    print("\nfinal parameters (xxh3)  in peace          with failure")
    for slot in range(NUM_SLOTS):
        one, other = peace.hashes.get(slot, "-"), failure.hashes.get(slot, "-")
        verdict = "equal" if one == other else "DIFFER"
        print(f"slot {slot}                   {one:<16}  {other:<16}  {verdict}")
    picture = args.output_dir / "losses.png"
    draw(peace, failure, not found, picture)
    print(f"\nall losses: {_short(full)}   curves: {_short(picture)}")
    for line in found:
        print(f"DIFFERENT: {line}")
    if not found:
        print(
            f"A node died and training went on: {num_iterations} losses and the parameters of "
            f"{NUM_SLOTS} slots are the same in every bit."
        )
    return found


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
