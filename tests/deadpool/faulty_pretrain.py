"""pretrain_gpt.py in which trainers have the faults that `faults.json` in the log folder names.

It is a list of {"slot", "iteration", "phase", "fault", "times"}, times counted over all processes
by files beside it. Phases: those of the driver's hooks, "capture", which is the middle of a
capture, and "rejoin", where a recovery begins to enter its epoch. Faults: see `FAULTS`; or a
number, a signal that the trainer sends itself.
"""

import json
import os
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import psutil

import pretrain_gpt

STOP_S = 6
"""How long a node is stopped."""


def kill_node():
    os.killpg(os.getpgrp(), signal.SIGKILL)


def stop_node():
    later = f"sleep {STOP_S}; kill -CONT -{os.getpgrp()}"
    subprocess.Popen(["sh", "-c", later], start_new_session=True)
    os.killpg(os.getpgrp(), signal.SIGSTOP)


def kill_guardian():
    """The parent of the trainer's zygote."""
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
    time.sleep(60)  # This process ends with it.


def raise_error():
    raise ValueError("a fault on purpose")


def run_out_of_memory():
    raise MemoryError("a fault on purpose")


def hang():
    time.sleep(3600)


FAULTS = {
    f.__name__: f
    for f in (kill_node, stop_node, kill_guardian, raise_error, run_out_of_memory, hang)
}


def cause(fault):
    if isinstance(fault, int):
        os.kill(os.getpid(), fault)
    else:
        FAULTS[fault]()


def train(argv, hooks=None):
    from deadpool import parallel_state

    def cause_where_told(phase, iteration):
        log_dir = hooks._config.log_dir
        path = os.path.join(log_dir, "faults.json")
        if not os.path.exists(path):
            return
        with open(path) as file:
            told = json.load(file)
        slot = int(parallel_state.get_slot()) if not parallel_state.is_spare() else -1
        for index, each in enumerate(told):
            if [slot, iteration, phase] != [each["slot"], each["iteration"], each["phase"]]:
                continue
            for number in range(each["times"]):
                mark = os.path.join(log_dir, f"fault-{index}-{number}")
                try:
                    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                cause(each["fault"])

    on_phase, on_ready, enter_epoch = hooks.on_phase, hooks.on_ready, hooks._enter_epoch

    def fault_in_phase(phase, microbatch=None):
        on_phase(phase, microbatch)
        cause_where_told(phase.value, hooks._trainer.state.iteration + 1)

    def fault_in_capture(trainer):
        on_halfway = hooks._injector.fire

        def fire(iteration, phase):
            cause_where_told(phase.value, iteration)
            on_halfway(iteration, phase)

        hooks._injector.fire = fire
        on_ready(trainer)

    def fault_in_recovery(trainer):
        cause_where_told("rejoin", trainer.state.iteration)
        enter_epoch(trainer)

    hooks.on_phase, hooks.on_ready = fault_in_phase, fault_in_capture
    hooks._enter_epoch = fault_in_recovery
    return pretrain_gpt.train(argv, hooks)


if __name__ == "__main__":
    from deadpool import run

    sys.exit(run.main(sys.argv[1:], train=train, check=pretrain_gpt.check))
