"""pretrain_gpt.py in which trainers end or stop themselves by a signal, or sleep for ever, where
the file `crashes.json` in the log folder says.

It is a list of {"slot", "iteration", "phase", "signal", "times"}, times counted over all processes
by files beside it; signal 0 is the sleep. Phases: those of the driver's hooks, "capture", which is
the middle of a capture, and "rejoin", where a recovery begins to enter its epoch.
"""

import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import pretrain_gpt


def train(argv, hooks=None):
    from deadpool import parallel_state

    def crash_where_told(phase, iteration):
        log_dir = hooks._config.log_dir
        path = os.path.join(log_dir, "crashes.json")
        if not os.path.exists(path):
            return
        with open(path) as file:
            told = json.load(file)
        slot = int(parallel_state.get_slot()) if not parallel_state.is_spare() else -1
        for index, each in enumerate(told):
            if [slot, iteration, phase] != [each["slot"], each["iteration"], each["phase"]]:
                continue
            for number in range(each["times"]):
                mark = os.path.join(log_dir, f"crash-{index}-{number}")
                try:
                    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                if each["signal"]:
                    os.kill(os.getpid(), each["signal"])
                else:
                    time.sleep(3600)

    on_phase, on_ready, enter_epoch = hooks.on_phase, hooks.on_ready, hooks._enter_epoch

    def crash_in_phase(phase, microbatch=None):
        crash_where_told(phase.value, hooks._trainer.state.iteration + 1)
        on_phase(phase, microbatch)

    def crash_in_capture(trainer):
        on_halfway = hooks._injector.fire

        def fire(iteration, phase):
            crash_where_told(phase.value, iteration)
            on_halfway(iteration, phase)

        hooks._injector.fire = fire
        on_ready(trainer)

    def crash_in_recovery(trainer):
        crash_where_told("rejoin", trainer.state.iteration)
        enter_epoch(trainer)

    hooks.on_phase, hooks.on_ready = crash_in_phase, crash_in_capture
    hooks._enter_epoch = crash_in_recovery
    return pretrain_gpt.train(argv, hooks)


if __name__ == "__main__":
    from deadpool import run

    sys.exit(run.main(sys.argv[1:], train=train, check=pretrain_gpt.check))
