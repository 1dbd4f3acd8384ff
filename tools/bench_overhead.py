"""What DEADPOOL costs while nothing fails: `python tools/bench_overhead.py`.

Trains the same model with and without --deadpool on this machine: the same nodes, ranks, data and
threads, started the same way and timed by the same code (`tools/bench_pretrain.py`), in rounds that
take the sides in turns (A B, then B A). Both must give the same losses in every bit. Exit code 1
when a run fails or losses differ, 2 for input that does not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deadpool.forkserver import PRELOAD, ForkServer  # noqa: E402
from deadpool.process import die_with_parent  # noqa: E402
from tools.bench_measure import (  # noqa: E402
    format_size,
    machine,
    machine_line,
    median_ratio,
    table,
)

SCRIPT = str(ROOT / "tools" / "bench_pretrain.py")
PLAIN = "plain"

ALTERNATING = "alternating"
BLOCK = 4
"""Iterations with snapshots, then as many without. The first of each is not counted: the last
replica of the block before it is still under way."""

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "capture-only": {"replicates": False},
    "replica-only": {"captures": False},
    "control-only": {"captures": False, "replicates": False},
    "alternating": {"alternates": BLOCK},
}
"""What is left out of --deadpool; control-only leaves guardians, their messages and commits.
alternating leaves snapshots out in every second block of iterations of one run, and compares those:
what the machine does besides falls on neighbouring iterations alike."""

_POLL_S = 0.25


class BenchError(Exception):
    """A run failed; the text says which and shows the end of its output."""


# What to run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int


MODELS = {
    model.name: model
    for model in (
        Model(name="tiny", num_layers=4, hidden_size=64, num_heads=4, vocab_size=1024),
        Model(name="20M", num_layers=8, hidden_size=384, num_heads=6, vocab_size=16384),
        Model(name="50M", num_layers=8, hidden_size=640, num_heads=10, vocab_size=16384),
        Model(name="125M", num_layers=12, hidden_size=768, num_heads=12, vocab_size=50304),
    )
}


def parse_model(text: str) -> Model:
    """A name, or LAYERSxHIDDENxHEADSxVOCABULARY. Raises ValueError."""
    if text in MODELS:
        return MODELS[text]
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", text)
    sizes = [int(group) for group in match.groups()] if match else []
    if not sizes or min(sizes) < 1:
        raise ValueError(
            f"--models {text}: give {', '.join(MODELS)} or LAYERSxHIDDENxHEADSxVOCABULARY, "
            "e.g. 8x384x6x16384"
        )
    if sizes[1] % sizes[2]:
        raise ValueError(
            f"--models {text}: {sizes[1]} hidden units do not divide among {sizes[2]} heads"
        )
    return Model(
        name=text,
        num_layers=sizes[0],
        hidden_size=sizes[1],
        num_heads=sizes[2],
        vocab_size=sizes[3],
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A grid on virtual nodes. Data-parallel peers are on nodes of their own; without data
    parallelism, every rank is."""

    pipeline: int
    tensor: int
    data: int

    @property
    def name(self) -> str:
        sizes = {"pp": self.pipeline, "tp": self.tensor, "dp": self.data}
        return "-".join(f"{key}{size}" for key, size in sizes.items() if size > 1)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tensor * self.data

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.data if self.data > 1 else 1

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node


def parse_layout(text: str) -> Layout:
    """`dp2`, `pp2-dp2`, `pp2/tp2`. Raises ValueError."""
    sizes = {"pp": 1, "tp": 1, "dp": 1}
    for part in re.split(r"[-/]", text):
        match = re.fullmatch(r"(pp|tp|dp)([1-9]\d*)", part)
        if match is None:
            raise ValueError(f"--grids {text}: the form is pp2-tp1-dp2, with what is 1 left out")
        sizes[match[1]] = int(match[2])
    layout = Layout(pipeline=sizes["pp"], tensor=sizes["tp"], data=sizes["dp"])
    if layout.num_nodes < 2:
        raise ValueError(f"--grids {text}: one rank has no neighbour to hold its replica")
    return layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of all runs of one invocation."""

    iterations: int
    warm_up: int
    batch_size: int
    """Sequences in an iteration."""
    micro_batch_size: int
    seq_length: int
    trainer_cores: tuple[int, ...]
    """Empty: wherever the kernel puts them."""
    guardian_cores: tuple[int, ...]
    time_limit_s: float
    extra: tuple[str, ...]
    """Flags for both sides."""


def training_flags(model: Model, layout: Layout, settings: Settings, cache: Path) -> list[str]:
    """What both sides are given."""
    flags = f"""
        --tensor-model-parallel-size {layout.tensor}
        --pipeline-model-parallel-size {layout.pipeline} --use-tp-pp-dp-mapping
        --use-distributed-optimizer --transformer-impl local --distributed-backend gloo
        --num-layers {model.num_layers} --hidden-size {model.hidden_size}
        --num-attention-heads {model.num_heads}
        --seq-length {settings.seq_length} --max-position-embeddings {settings.seq_length}
        --micro-batch-size {settings.micro_batch_size} --global-batch-size {settings.batch_size}
        --train-iters {settings.iterations} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
        --clip-grad 1.0 --seed 1234 --mock-data --tokenizer-type NullTokenizer
        --vocab-size {model.vocab_size} --split 100,0,0 --eval-iters 0 --num-workers 0
        --log-interval 1000000 --data-cache-path {cache}
    """
    return [*flags.split(), *settings.extra]


# One run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training took, after its warm-up. CPU and stalls: seconds an iteration."""

    side: str
    load: float
    """Average of the last minute, at its start."""
    iteration_s: list[float]
    trainers_cpu_s: float
    """All trainers together."""
    guardians_cpu_s: float
    delay_s: float
    """How long trainers were ready to run and had no core, the mean of the slots: of a busy
    machine."""
    capture_s: float
    """Of the slowest slot in each iteration: copy, random-number states and metadata."""
    stall_s: float
    """Of the slowest slot in each iteration."""
    snapshot_bytes: int
    """Of all slots."""
    replica_gb_per_s: float
    """Of one slot's replica, the median; 0 where there is none."""
    trainers_bytes: int
    guardians_bytes: int
    num_parameters: int
    """On all slots together: a pipeline's two copies of the embedding both count, data-parallel
    copies too."""
    losses: list[dict[str, str]]


def read_run(folder: Path, side: str, load: float, warm_up: int) -> Run:
    """From what the processes left. Raises BenchError where some left nothing."""
    slots = [json.loads(file.read_text()) for file in sorted(folder.glob("slot*.json"))]
    guardians = [json.loads(file.read_text()) for file in sorted(folder.glob("guardian*.json"))]
    if not slots or (side != PLAIN and len(guardians) != len(slots)):
        raise BenchError(f"{side}: {len(slots)} slots and {len(guardians)} guardians left figures")
    rows = [slot["rows"] for slot in slots]
    ends = [max(row["end"] for row in step) for step in zip(*rows, strict=True)]
    num = len(ends) - warm_up
    puts = [put for g in guardians for put in g["rows"] if put["iteration"] > warm_up]
    rates = [put["bytes"] / (put["end"] - put["begin"]) / 1e9 for put in puts if put["bytes"]]

    def slowest(*names: str) -> float:
        steps = list(zip(*rows, strict=True))[warm_up:]
        return sum(max(sum(row[n] for n in names) for row in step) for step in steps) / num

    return Run(
        side=side,
        load=load,
        iteration_s=[b - a for a, b in zip(ends[warm_up - 1 :], ends[warm_up:], strict=False)],
        trainers_cpu_s=sum(r[-1]["cpu"] - r[warm_up - 1]["cpu"] for r in rows) / num,
        guardians_cpu_s=sum(guardian_cpu_s(g["rows"], warm_up) for g in guardians),
        delay_s=sum(r[-1]["delay"] - r[warm_up - 1]["delay"] for r in rows) / num / len(rows),
        capture_s=slowest("capture", "seal"),
        stall_s=slowest("stall"),
        snapshot_bytes=sum(slot["snapshot_bytes"] for slot in slots),
        replica_gb_per_s=statistics.median(rates) if rates else 0.0,
        trainers_bytes=sum(slot["memory_bytes"] for slot in slots),
        guardians_bytes=sum(guardian["memory_bytes"] for guardian in guardians),
        num_parameters=sum(slot["num_parameters"] for slot in slots),
        losses=next((r for r in ([x["losses"] for x in r] for r in rows) if any(r)), []),
    )


def guardian_cpu_s(puts: Sequence[dict[str, Any]], warm_up: int) -> float:
    """An iteration, from the end of the warm-up's last put to that of the last."""
    counted = [put for put in puts if put["iteration"] >= warm_up]
    if len(counted) < 2:
        return 0.0
    num = counted[-1]["iteration"] - counted[0]["iteration"]
    return (counted[-1]["cpu"] - counted[0]["cpu"]) / num


def run_side(side: str, model: Model, layout: Layout, settings: Settings, note: Any) -> Run:
    """Train once. note(iterations done): called now and then. Raises BenchError."""
    folder = Path(tempfile.mkdtemp(prefix="deadpool-bench-"))
    load = os.getloadavg()[0]
    try:
        bench = {
            "folder": str(folder),
            "iterations": settings.iterations,
            "trainer_cores": settings.trainer_cores,
            "guardian_cores": settings.guardian_cores,
            **VARIANTS.get(side, {}),
        }
        flags = training_flags(model, layout, settings, folder / "cache")
        _follow(_start(side, layout, flags, bench, folder), side, folder, settings, note)
        return read_run(folder, side, load, settings.warm_up)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(side: str, layout: Layout, flags: list[str], bench: dict[str, Any], folder: Path) -> int:
    """The launcher of either side in a child, which has imported everything: importing takes
    seconds of CPU. Returns its pid."""
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        descriptor = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ["DEADPOOL_BENCH"] = json.dumps(bench)
        code = _launch_plain(layout, flags) if side == PLAIN else _launch(layout, flags, folder)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _launch(layout: Layout, flags: list[str], folder: Path) -> int:
    from deadpool.__main__ import main

    launch = f"launch --nodes {layout.num_nodes + 1} --ranks-per-node {layout.ranks_per_node}"
    deadpool = f"--spare-nodes 1 {SCRIPT} --deadpool --deadpool-log-dir {folder / 'log'}"
    return main([*launch.split(), *deadpool.split(), *flags])


def _launch_plain(layout: Layout, flags: list[str]) -> int:
    """As `torchrun` would, from the same kind of process as DEADPOOL's launcher forks."""
    server = ForkServer(SCRIPT, flags)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    codes = []
    try:
        for node in range(layout.num_nodes):
            environs = [
                {
                    "RANK": str(node * layout.ranks_per_node + local_rank),
                    "LOCAL_RANK": str(local_rank),
                    "WORLD_SIZE": str(layout.world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                }
                for local_rank in range(layout.ranks_per_node)
            ]
            command = json.dumps({"start": node, "environs": environs}) + "\n"
            server.socket.sendall(command.encode())
        for line in server.socket.makefile():
            message = json.loads(line)
            if "ended" in message:
                codes.append(message["code"])
                if message["code"] or len(codes) == layout.num_nodes:
                    break
    finally:
        server.close()
    return max(codes, default=1)


def _follow(pid: int, side: str, folder: Path, settings: Settings, note: Any) -> None:
    """To its end. Ended by force when the time is over or this process is interrupted."""
    started, progress, status = time.monotonic(), folder / "progress", None
    try:
        while status is None:
            time.sleep(_POLL_S)
            ended, value = os.waitpid(pid, os.WNOHANG)
            status = value if ended else None
            note(progress.stat().st_size if progress.exists() else 0)
            if time.monotonic() - started > settings.time_limit_s:
                raise BenchError(f"{side}: not done after {settings.time_limit_s:g} s")
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)  # What it started dies with it.
            os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        lines = (folder / "output").read_text(errors="replace").splitlines()
        raise BenchError(f"{side}: exit code {code}; its output ends:\n" + "\n".join(lines[-15:]))


# All runs


def order(num_rounds: int, sides: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Rounds of all sides, every second one backwards, so that a drift of the machine falls on
    all alike."""
    for number in range(num_rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            yield number, side


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One model on one grid, one variant beside plain training."""

    model: str
    grid: str
    variant: str
    ratio: float
    low: float
    high: float
    plain_s: float
    """An iteration, the median, as are the sums below over all runs."""
    with_s: float
    trainers_cpu_plain_s: float
    trainers_cpu_s: float
    guardians_cpu_s: float
    delay_plain_s: float
    delay_s: float
    capture_s: float
    stall_s: float
    snapshot_bytes: int
    replica_gb_per_s: float
    memory_plain_bytes: int
    memory_bytes: int
    num_parameters: int

    @property
    def stall_share(self) -> float:
        return self.stall_s / self.with_s

    @property
    def added_cpu_s(self) -> float:
        return self.trainers_cpu_s + self.guardians_cpu_s - self.trainers_cpu_plain_s


def split_blocks(iteration_s: Sequence[float], warm_up: int) -> tuple[list[float], list[float]]:
    """Of a run that alternates: iterations with snapshots and those without, that pair in turn."""
    with_: list[float] = []
    without: list[float] = []
    for index, seconds in enumerate(iteration_s):
        block, place = divmod(warm_up + index, BLOCK)  # Iteration warm_up + 1 + index.
        if place > 0:
            (without if block % 2 else with_).append(seconds)
    num = min(len(with_), len(without))
    return with_[:num], without[:num]


def compare(
    model: str, grid: str, plain: Sequence[Run], runs: Sequence[Run], warm_up: int
) -> Result:
    """Run k of both is of round k; of `alternating`, both are the same runs. Raises BenchError
    where losses differ."""
    for a, b in zip(plain, runs, strict=True):
        if a.losses != b.losses:
            raise BenchError(f"{model} {grid}: losses of {b.side} are not those of {a.side}")
    pairs = [(b.iteration_s, a.iteration_s) for a, b in zip(plain, runs, strict=True)]
    if plain is runs:
        pairs = [split_blocks(run.iteration_s, warm_up) for run in runs]
    ratio, low, high = median_ratio(pairs)

    def middle(of: Sequence[Run], name: str) -> Any:
        return statistics.median(getattr(run, name) for run in of)

    return Result(
        model=model,
        grid=grid,
        variant=runs[0].side,
        ratio=ratio,
        low=low,
        high=high,
        plain_s=statistics.median(s for _, without in pairs for s in without),
        with_s=statistics.median(s for with_, _ in pairs for s in with_),
        trainers_cpu_plain_s=middle(plain, "trainers_cpu_s"),
        trainers_cpu_s=middle(runs, "trainers_cpu_s"),
        guardians_cpu_s=middle(runs, "guardians_cpu_s"),
        delay_plain_s=middle(plain, "delay_s"),
        delay_s=middle(runs, "delay_s"),
        capture_s=middle(runs, "capture_s"),
        stall_s=middle(runs, "stall_s"),
        snapshot_bytes=runs[0].snapshot_bytes,
        replica_gb_per_s=middle(runs, "replica_gb_per_s"),
        memory_plain_bytes=middle(plain, "trainers_bytes"),
        memory_bytes=middle(runs, "trainers_bytes") + middle(runs, "guardians_bytes"),
        num_parameters=plain[0].num_parameters,
    )


def show(results: Sequence[Result]) -> str:
    header = ["model grid variant", "ratio", "95 %", "plain s", "with s", "trainers CPU s"]
    header += [
        "guardians",
        "no core s",
        "capture s",
        "stall s",
        "stall",
        "snapshots",
        "GB/s",
        "memory",
    ]
    rows = [
        [
            f"{r.model} {r.grid} {r.variant}",
            f"{r.ratio:.3f}",
            f"{r.low:.3f}..{r.high:.3f}",
            f"{r.plain_s:.3f}",
            f"{r.with_s:.3f}",
            f"{r.trainers_cpu_plain_s:.3f} -> {r.trainers_cpu_s:.3f}",
            f"{r.guardians_cpu_s:.3f}",
            f"{r.delay_plain_s:.3f} -> {r.delay_s:.3f}",
            f"{r.capture_s:.4f}",
            f"{r.stall_s:.4f}",
            f"{100 * r.stall_share:.1f} %",
            format_size(r.snapshot_bytes),
            f"{r.replica_gb_per_s:.2f}" if r.replica_gb_per_s else "-",
            f"{format_size(r.memory_plain_bytes)} -> {format_size(r.memory_bytes)}",
        ]
        for r in results
    ]
    return table(header, rows)


def draw(results: Sequence[Result], file: str) -> None:
    """Ratios with their intervals, as a picture. Needs matplotlib, and no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.4 * len(results)), layout="constrained")
    places = range(len(results), 0, -1)
    for place, r in zip(places, results, strict=True):
        axes.plot([r.low, r.high], [place, place], color="#9ecae1", linewidth=4)
        axes.plot(r.ratio, place, "o", color="#08306b")
    axes.set_yticks(list(places), [f"{r.model} {r.grid} {r.variant}" for r in results])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("iteration time, with --deadpool / without: median and 95 % interval")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


class Meter:
    """Where a long measurement stands: a line that renews itself on a terminal, else one a run."""

    def __init__(self, num_runs: int, iterations: int) -> None:
        self._num_runs, self._iterations, self._number = num_runs, iterations, 0
        self._title = ""

    def begin(self, title: str) -> None:
        self._number += 1
        self._title = f"run {self._number}/{self._num_runs}: {title}"

    def note(self, num_done: int) -> None:
        if sys.stdout.isatty():
            text = f"{self._title}: iteration {num_done}/{self._iterations}"
            print(f"\r\x1b[K{text}", end="", flush=True)

    def end(self, run: Run) -> None:
        start = "\r\x1b[K" if sys.stdout.isatty() else ""
        middle = statistics.median(run.iteration_s)
        print(f"{start}{self._title}: {middle:.3f} s/iteration, load {run.load:.1f}", flush=True)


def measure(
    models: Sequence[Model],
    layouts: Sequence[Layout],
    variants: Sequence[str],
    num_pairs: int,
    settings: Settings,
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Results, and every run as it was. Raises BenchError."""
    sides = [*([PLAIN] if set(variants) - {ALTERNATING} else []), *variants]
    meter = Meter(len(models) * len(layouts) * len(sides) * num_pairs, settings.iterations)
    results, raw = [], []
    for model in models:
        for layout in layouts:
            runs: dict[str, list[Run]] = {side: [] for side in sides}
            for number, side in order(num_pairs, sides):
                meter.begin(f"{model.name} {layout.name} {side}, pair {number + 1}")
                run = run_side(side, model, layout, settings, meter.note)
                meter.end(run)
                runs[side].append(run)
                place = {"model": model.name, "grid": layout.name, "round": number}
                raw.append({**place, **dataclasses.asdict(run)})
            for variant in variants:
                beside = runs[variant] if variant == ALTERNATING else runs[PLAIN]
                results.append(
                    compare(model.name, layout.name, beside, runs[variant], settings.warm_up)
                )
    return results, raw


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="What DEADPOOL costs while nothing fails. Flags behind -- go to both trainings."
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["20M"],
        metavar="MODEL",
        help=f"{', '.join(MODELS)} or LAYERSxHIDDENxHEADSxVOCABULARY (default: 20M)",
    )
    parser.add_argument(
        "--grids", nargs="+", default=["dp2"], metavar="GRID", help="e.g. dp2 pp2-dp2 tp2-dp2"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["full"],
        choices=list(VARIANTS),
        help="what of DEADPOOL is at work (default: full)",
    )
    parser.add_argument("--pairs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--iterations", type=int, default=12, help="of a run (default: 12)")
    parser.add_argument("--warm-up", type=int, default=3, help="of them not counted (default: 3)")
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument(
        "--pin",
        action="store_true",
        help="guardians on the last core, trainers of both sides on the others",
    )
    parser.add_argument("--time-limit", type=float, default=900, help="seconds a run may take")
    parser.add_argument("--json", metavar="FILE", help="write everything there, every run too")
    parser.add_argument("--plot", metavar="FILE", help="write a picture there (matplotlib)")
    return parser


def checked_settings(args: argparse.Namespace, extra: Sequence[str]) -> Settings:
    """Raises ValueError with what was given and what fits."""
    for name in ("pairs", "iterations", "warm_up", "global_batch_size", "micro_batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    if args.iterations < args.warm_up + 2:
        raise ValueError(
            f"--iterations {args.iterations} --warm-up {args.warm_up}: at least 2 must be left to "
            f"count; give --iterations {args.warm_up + 2} or more"
        )
    if ALTERNATING in args.variants and args.iterations < args.warm_up + 2 * BLOCK:
        raise ValueError(
            f"--iterations {args.iterations} --warm-up {args.warm_up}: to alternate takes two "
            f"blocks of {BLOCK}; give --iterations {args.warm_up + 2 * BLOCK} or more"
        )
    cores = sorted(os.sched_getaffinity(0))
    if args.pin and len(cores) < 2:
        raise ValueError("--pin: there is one core here, trainers and guardians need one each")
    return Settings(
        iterations=args.iterations,
        warm_up=args.warm_up,
        batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        trainer_cores=tuple(cores[:-1]) if args.pin else (),
        guardian_cores=tuple(cores[-1:]) if args.pin else (),
        time_limit_s=args.time_limit,
        extra=tuple(extra),
    )


def split_extra(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Ours, and what stands behind `--`."""
    given = list(argv)
    place = given.index("--") if "--" in given else len(given)
    return given[:place], given[place + 1 :]


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    ours, extra = split_extra(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(ours)
    try:
        settings = checked_settings(args, extra)
        models = [parse_model(text) for text in args.models]
        layouts = [parse_layout(text) for text in args.grids]
    except ValueError as error:
        parser.error(str(error))
    facts = machine()
    print(machine_line(facts))
    tokens = settings.batch_size * settings.seq_length
    print(f"{tokens} tokens an iteration; importing torch and megatron-core", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # Read by torch once, when it is imported.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, of optional packages.
        for name in PRELOAD:
            importlib.import_module(name)
    try:
        results, runs = measure(models, layouts, args.variants, args.pairs, settings)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the run was ended", file=sys.stderr)
        return 128 + signal.SIGINT
    print("\n" + show(results))
    print(f"load average at the end: {' '.join(f'{x:.2f}' for x in os.getloadavg())}")
    if args.json:
        report = {
            "machine": facts,
            "settings": dataclasses.asdict(settings),
            "results": [dataclasses.asdict(result) for result in results],
            "runs": runs,
        }
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        draw(results, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
