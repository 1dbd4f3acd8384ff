"""What README and examples/ tell people to type parses, and every flag they name exists."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from deadpool.config import RankEnvironment, add_arguments, checked_job, grid_of_rank, parse_config
from deadpool.join import add_join_parser
from deadpool.launcher import add_launch_parser
from megatron.training.arguments import parse_args, validate_args
from tools import preprocess_data

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
OTHERS_FLAGS = {
    *("--nodes", "--ntasks-per-node", "--gpus-per-node", "--help"),
    *("--no-kill", "--kill-on-bad-exit", "--wait"),
}
"""Of Slurm's commands, and of any command."""


def build_deadpool_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    add_launch_parser(subparsers)
    add_join_parser(subparsers)
    return parser


def commands(text: str) -> list[list[str]]:
    """The words of each shell command: lines joined at backslashes, without comments. Variables
    stay as they are written, but a default `${NAME:-value}` is taken and `$JOB` is filled in."""
    text = re.sub(r"\\\n\s*", " ", text)
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    lines = (line.strip() for line in text.splitlines())
    found, job = [], ""
    for line in lines:
        if not line or line.startswith("#"):
            continue
        if line.startswith("JOB="):
            job = shlex.split(line)[0].removeprefix("JOB=")
        else:
            found.append(shlex.split(line.replace("$JOB", job).rstrip("& ")))
    return found


def all_commands() -> list[tuple[str, list[str]]]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    found = [("README.md", words) for block in blocks for words in commands(block)]
    for script in SCRIPTS:
        found += [(script.name, words) for words in commands(script.read_text(encoding="utf-8"))]
    assert len(found) > 8
    return found


def slurm_sizes() -> dict[str, str]:
    """What srun tells the first task of the README's batch script."""
    sizes = re.search(r"^#SBATCH --nodes=(\d+) --ntasks-per-node=(\d+)", README, re.MULTILINE)
    assert sizes is not None
    nodes, tasks = map(int, sizes.groups())
    return {
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * tasks),
    }


def test_join_command_parses() -> None:
    (line,) = re.findall(r"^    python -m deadpool (join .*)$", README, re.MULTILINE)
    joining = build_deadpool_parser().parse_args(line.split())
    assert joining.node >= joining.nodes > joining.spare_nodes > 0
    assert (joining.script, joining.arguments) == ("SCRIPT", ["ARGS..."])


def after(words: list[str], name: str) -> list[str] | None:
    """The words after the one that ends in `name`."""
    for position, word in enumerate(words):
        if word.endswith(name):
            return words[position + 1 :]
    return None


@pytest.mark.parametrize(
    ("where", "words"),
    [pytest.param(*c, id=f"{c[0]}: {' '.join(c[1][:3])}") for c in all_commands()],
)
def test_command_parses_and_its_flags_fit(
    where: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = after(words, "preprocess_data.py")
    if flags is not None:
        preprocess_data.build_parser().parse_args(flags)
    world_size = 0
    launch = after(words, "deadpool")
    if launch and launch[0] == "launch":
        launched = build_deadpool_parser().parse_args(launch)
        launched.script = str(ROOT / Path(launched.script).name)
        _, grid = checked_job(launched)
        world_size = grid.world_size
    torchrun = after(words, "torchrun")
    if torchrun is not None:
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(torchrun)
        assert parsed.training_script.endswith("pretrain_gpt.py")
        world_size = int(parsed.nnodes.partition(":")[0]) * int(parsed.nproc_per_node)
    flags = after(words, "pretrain_gpt.py")
    if flags is not None and words[0] == "srun" and torchrun is None:
        for name, value in {**slurm_sizes(), "DEADPOOL_JOB_FILE": "job.json"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("DEADPOOL_NODE", raising=False)
        config, _ = parse_config(flags)
        assert config.spare_nodes is not None
        environment = RankEnvironment.from_environ(config.spare_nodes)
        world_size = grid_of_rank(flags, environment).world_size
    if flags is not None:
        assert world_size
        args = parse_args(flags, add_arguments)
        monkeypatch.chdir(tmp_path)
        needed = [f"{prefix}.{kind}" for prefix in args.data_path or () for kind in ("bin", "idx")]
        needed += filter(None, [args.vocab_file, args.merge_file, args.tokenizer_model])
        for file in needed:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).touch()
        validate_args(args, world_size)


def known_flags() -> set[str]:
    from torch.distributed.run import get_args_parser

    from megatron.training.arguments import build_parser

    parsers: list[argparse.ArgumentParser] = [
        build_parser(add_arguments),
        preprocess_data.build_parser(),
        get_args_parser(),
    ]
    flags = {flag for parser in parsers for flag in parser._option_string_actions}
    sizes = ["--nodes", "3", "script"]
    launch = build_deadpool_parser().parse_args(["launch", *sizes])
    join = build_deadpool_parser().parse_args(["join", "host:1", "--node", "3", *sizes])
    ours = {"--" + name.replace("_", "-") for name in [*vars(launch), *vars(join)]}
    return flags | OTHERS_FLAGS | ours


@pytest.mark.parametrize("file", [ROOT / "README.md", *SCRIPTS], ids=lambda file: file.name)
def test_every_flag_that_is_named_exists(file: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", file.read_text(encoding="utf-8")))
    assert named <= known_flags()


def test_flags_table_is_complete() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    rows = re.findall(r"^\| `(--[\w-]+)", README, re.MULTILINE)
    assert sorted(rows) == sorted(parser._option_string_actions)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^    make (\w+)$", README, re.MULTILINE))
    assert targets == {"demo", "test"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    for target in [*targets, "lint"]:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, env=environment)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_example_is_a_well_formed_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


def test_links_and_named_files_exist() -> None:
    targets = re.findall(r"\]\(([^)#][^)]*)\)", README)
    named = re.findall(r"`((?:tools|examples|deadpool|megatron|docs)/[\w./]*)`", README)
    absent = [t for t in targets + named if not t.startswith("http") and not (ROOT / t).exists()]
    assert not absent
