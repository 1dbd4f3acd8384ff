"""The guardian: owns the snapshot memory, watches its trainer, speaks for it, leads when asked.

One per launcher task, without torch. It forks the zygote of its trainers first, before it has a
thread or an event loop; then it is one asyncio program around the protocol's core
(`deadpool.protocol`): what happens becomes an event, what the core answers is carried out. Nothing
is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from deadpool import emergency, job_file
from deadpool import messages as m
from deadpool.arena import Arena, ReplicaShelf
from deadpool.config import DeadpoolConfig, RankEnvironment, format_address
from deadpool.injection import Copy, Injector
from deadpool.interfaces import choose_host
from deadpool.mpi.transport import MpiTransport
from deadpool.pace import SnapshotClock
from deadpool.peers import Peers
from deadpool.process import describe_exit, exit_code_of, set_process_name, signal_of
from deadpool.progress import ProgressBoard
from deadpool.protocol import events as e
from deadpool.protocol.guardian import Guardian
from deadpool.protocol.leader import Settings
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import (
    EXIT_GUARDIAN_FAILED,
    EXIT_NO_JOB,
    Member,
    MemberId,
    Node,
    ProtocolError,
)
from deadpool.replication import ReplicaServer
from deadpool.swap_report import SwapReporter
from deadpool.terminal import say
from deadpool.trace import TraceWriter
from deadpool.transfers import Transfers
from deadpool.wire import WireError, read_message, write_message
from deadpool.zygote import Zygote

logger = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 60.0
"""How long a trainer may take to end after a completed job; after a failed one it is killed."""

_KEEP_TIMEOUT_S = 590.0
"""For writing snapshots to disk at the end of a job that lacks a node."""

_CONTACT_RETRY_S = 0.1

TrainerMain = Callable[[socket.socket, Arena, ProgressBoard, bool], int]


def run_guardian(
    config: DeadpoolConfig,
    environment: RankEnvironment,
    grid: Grid,
    trainer_main: TrainerMain,
    preload: Sequence[str] = (),
) -> int:
    """Run one rank of a node to its end; returns its exit code.

    trainer_main: runs in a forked child with its end of the socket pair, the arena, the board, and
    whether it is the first trainer here; returns the trainer's exit code. preload: modules that it
    imports.
    """
    arena, board = Arena.create(), ProgressBoard()
    zygote = Zygote(lambda link, is_first: trainer_main(link, arena, board, is_first), preload)
    set_process_name("dp-guardian")
    guardian = GuardianProcess(config, environment, grid, arena, board, zygote)
    try:
        return asyncio.run(guardian.run())
    finally:
        zygote.close()


class GuardianProcess:
    """One guardian's connections, memory and trainer; every method runs on its event loop."""

    def __init__(
        self,
        config: DeadpoolConfig,
        environment: RankEnvironment,
        grid: Grid,
        arena: Arena,
        board: ProgressBoard,
        zygote: Zygote,
    ) -> None:
        self._config = config
        self._environment = environment
        self._settings = Settings(
            grid=grid,
            num_spare_nodes=environment.num_spare_nodes,
            replicas=config.replicas,
            bounds=config.bounds(),
            max_respawns=config.max_respawns,
            respawn_window=config.respawn_window(),
        )
        self._arena = arena
        self._board = board
        self._vigil = config.vigil()
        self._zygote = zygote
        self._trainer_status = 0
        """Of waitpid, of the last trainer that ended."""
        self._serving: asyncio.Task[None] | None = None
        """Of what the trainer says."""
        self._trainer_writer: asyncio.StreamWriter | None = None
        """None until the connection to a new trainer is open."""
        self._untold: list[m.Message] = []
        """For a trainer to which the connection is not open yet."""
        self._trainer_ended = asyncio.Event()
        self._core: Guardian | None = None
        """None until the trainer is up."""
        self._trace: TraceWriter | None = None
        self._report = SwapReporter(config.log_dir, bool(config.inject), grid.world_size)
        self._clock = SnapshotClock()
        self._leads_from: MemberId | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keeping: asyncio.Task[str] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[e.Exit] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_reader(self._zygote.fileno(), self._on_zygote_news)
        try:
            return await self._guard(await self._start_trainer())
        finally:
            await self._stop_trainer(0.0)
            if self._core is not None:
                self._transfers.cancel()
            while self._tasks:  # A cancellation can be swallowed: see `transfers._Lane`.
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks, timeout=0.1)
            loop.remove_reader(self._zygote.fileno())
            self._hang_up_on_trainer()

    async def _guard(self, trainer: asyncio.StreamReader) -> int:
        try:
            first = await read_message(trainer)
        except WireError:
            await self._stop_trainer(_LEAVE_TIMEOUT_S)
            return exit_code_of(self._trainer_status) or EXIT_NO_JOB
        assert isinstance(first, m.TrainerUp), first
        found = await self._find_job()
        if self._exit.done():
            return self._exit.result().exit_code
        if found is None:
            seconds = self._config.start_timeout_s
            self._say(
                f"no job was found within --deadpool-start-timeout {seconds:g} s: "
                f"{self._environment.job_file} did not come; is the folder shared between the "
                "nodes, and does task 0 run?"
            )
            return EXIT_NO_JOB
        self._token, contacts = found
        towards = contacts[0] if contacts else None
        try:
            host = self._environment.host or choose_host(self._config.interface, towards)
        except ValueError as error:
            self._say(str(error))
            return 2
        self._host = host
        peers = self._peers = Peers(token=self._token, deliver=self._feed)
        shelf = self._shelf = ReplicaShelf()
        node = Node(self._environment.node)
        self._injector = Injector(self._config.inject, node, self._config.log_dir)
        server = self._server = ReplicaServer(
            shelf=shelf,
            token=self._token,
            host=host,
            offered=self._ask,
            received=self._received,
            asked=self._ask,
            damaged=self._note_damage,
        )
        try:
            me = Member(
                member=MemberId(secrets.randbits(62)),
                node=node,
                local_rank=self._environment.local_rank,
                host=host,
                control_port=await peers.listen(host),
                data_port=server.port,
            )
            peers.introduce(me)
            self._begin(me)
            self._transfers = Transfers(
                arena=self._arena,
                token=self._token,
                injector=self._injector,
                feed=self._feed,
                damaged=self._note_damage,
                tell_trainer=self._tell_trainer,
                start=self._start,
                mpi=self._mpi_transport(server),
            )
            self._start(server.serve())
            self._start(self._tick())
            self._serving = self._start(self._serve_trainer(trainer))
            if self._environment.forms_job:
                self._write_job_file((me,))
            self._feed(e.Started(forms_job=self._environment.forms_job))
            end = await self._exit
            kept = await self._finish_keeping()
        finally:
            await peers.close()
            shelf.close()
        for words in (end.reason, kept):
            if words:
                self._say(words)
        await self._stop_trainer(_LEAVE_TIMEOUT_S if end.exit_code == 0 else 1.0)
        return end.exit_code

    def _mpi_transport(self, server: ReplicaServer) -> MpiTransport | None:
        launcher = self._config.mpi_launcher
        if launcher is None:
            return None
        return MpiTransport(
            launcher=launcher,
            measures=self._config.transport == "auto",
            serve=server.serve_channel,
            start=self._start,
        )

    def _say(self, words: str) -> None:
        """To a person, once a node; or by whoever leads."""
        if self._environment.local_rank == 0 or self._leads_from is not None:
            say(f"deadpool: {words}", is_error=True)

    def _begin(self, me: Member) -> None:
        self._core = Guardian(self._settings, me)
        if self._config.trace:
            assert self._config.log_dir is not None
            name = f"protocol-{me.node}-{me.local_rank}-{me.member}.jsonl"
            path = os.path.join(self._config.log_dir, name)
            self._trace = TraceWriter(path, self._settings, me)

    # Events and actions

    def _feed(self, event: e.Event) -> None:
        answer = self._handle(event)
        assert answer is None, f"{type(answer).__name__} answers {type(event).__name__}"

    def _ask(self, event: Any) -> Any:
        """An event of the replica server, and the core's answer to it."""
        answer = self._handle(event)
        if answer is None:  # The core has left; its process is on the way out.
            kind = e.AnswerPull if isinstance(event, e.Asked) else e.AnswerOffer
            return kind(buffer=None, refusal="this guardian has left the job")
        return answer

    def _received(self, event: e.Received) -> e.AnswerOffer:
        answer: e.AnswerOffer = self._ask(event)
        if not answer.refusal:
            kept = self._shelf.view(event.slot, event.buffer)
            self._injector.flip(Copy.REPLICA, event.iteration, kept)
        return answer

    def _handle(self, event: e.Event) -> e.AnswerOffer | e.AnswerPull | None:
        core = self._core
        if core is None or self._exit.done():
            return None
        self._report.see(event)
        self._clock.see(event, time.monotonic())
        answer = None
        try:
            actions = core.handle(event)
        except ProtocolError as error:
            if not isinstance(event, e.FromFollower | e.FromLeader):
                self._fail(error)
                return None
            self._peers.cut_off(event, str(error))
            actions = []
        except Exception as error:
            self._fail(error)
            return None
        if self._trace is not None:
            self._trace.step(event, actions)
        for action in actions:
            if isinstance(action, e.AnswerOffer | e.AnswerPull):
                answer = action
            else:
                self._carry_out(action)
        return answer

    def _note_damage(self, event: e.Damaged) -> None:
        """The keeper of a damaged copy says so itself, whoever leads."""
        self._say_of_node(
            f"the copy of slot {event.slot} at iteration {event.iteration} in its memory is "
            f"damaged and will not be used: {event.reason}"
        )
        self._feed(event)

    async def _keep(self, action: e.KeepSnapshots) -> str:
        """Where it is, for who leads to say; own failures are said here."""
        save, iteration = self._config.save, action.iteration
        if save is None:
            return f"without --save, iteration {iteration}, which memory holds, is not kept"
        assert self._core is not None
        for slot in action.slots:
            try:
                if slot == self._core.slot:
                    manifest = await self._transfers.manifest(slot, iteration)
                    buffer = self._arena.find(iteration)
                    found = (manifest, self._arena.payload(buffer)) if buffer is not None else None
                else:
                    found = self._shelf.find(slot, iteration)
                if found is None or found[0] is None:
                    self._say_of_node(f"iteration {iteration} of slot {slot} is damaged: not kept")
                    continue
                await emergency.write(save, found[0], found[1], self._settings.grid.world_size)
            except OSError as error:
                self._say_of_node(f"iteration {iteration} of slot {slot} was not kept: {error}")
        where = emergency.folder_of(save, iteration)
        return (
            f"iteration {iteration} is kept in {where}; the same command with --load {save} "
            "goes on from there"
        )

    async def _finish_keeping(self) -> str:
        """Before this guardian's memory goes."""
        keeping = self._keeping
        if keeping is None:
            return ""
        await asyncio.wait([keeping], timeout=_KEEP_TIMEOUT_S)
        if not keeping.done():
            self._say_of_node(f"snapshots were not written within {_KEEP_TIMEOUT_S:g} s")
            return ""
        return keeping.result() if self._leads_from is not None else ""

    def _say_of_node(self, words: str) -> None:
        """To a person, whoever leads."""
        environment = self._environment
        where = f"node {environment.node}, rank {environment.local_rank} of it"
        say(f"deadpool: {where}: {words}", is_error=True)

    def _fail(self, error: BaseException) -> None:
        """Our own error, after which this guardian's state is of no more use: it ends, aloud, and
        the job goes on without its node."""
        logger.critical("internal error of a guardian", exc_info=error)
        if not self._exit.done():
            reason = "internal error of a guardian"
            self._exit.set_result(e.Exit(exit_code=EXIT_GUARDIAN_FAILED, reason=reason))

    def _carry_out(self, action: e.Action) -> None:
        match action:
            case e.ToFollowers():
                self._peers.to_followers(action.members, action.message)
            case e.ToLeader():
                self._peers.to_leader(action.leader, action.message)
            case e.HangUp():
                self._peers.hang_up(action.members)
            case e.Probe():
                self._peers.probe(action.member)
            case e.FindContact():
                self._start(self._find_contact())
            case e.AbortTrainer():
                self._vigil.announced()
                self._transfers.cancel()
                self._tell_trainer(
                    m.EnterEpoch(
                        epoch=action.epoch, opens_store=action.opens_store, host=self._host
                    )
                )
            case e.CancelTransfers():
                self._transfers.cancel()
            case e.AdoptPlan():
                self._transfers.adopt(action)
                self._tell_trainer(m.PlanForSlot(plan=action.plan, slot=action.slot))
            case e.ResumeTrainer():
                self._tell_trainer(m.Resume(epoch=action.epoch))
                self._transfers.resume()
            case e.TellCommitted():
                self._tell_committed(action)
            case e.Put():
                self._transfers.put(action)
            case e.SpawnTrainer():
                self._respawn_trainer()
            case e.KillTrainer():
                self._say_of_node(f"its trainer hangs and is killed: {action.reason}")
                self._signal_trainer(signal.SIGKILL)
            case e.DrainTrainer():
                self._signal_trainer(signal.SIGTERM)
            case e.KeepSnapshots():
                self._keeping = self._start(self._keep(action))
            case e.Lacks():
                self._report.lack(action)
            case e.StopTrainer():
                end = action.end
                self._tell_trainer(m.TrainerEnd(exit_code=end.exit_code, reason=end.reason))
            case e.EnterPhase():
                self._report.enter(action)
            case e.Observe():
                self._report.observe(action)
            case e.SuspectCorruption():
                self._report.suspect(action)
            case e.RosterInstalled():
                self._lead(action.members)
            case e.Exit():
                self._leave(action)
            case _:
                raise AssertionError(f"{type(action).__name__} is not carried out here")

    def _tell_committed(self, action: e.TellCommitted) -> None:
        replicate_s, commit_s = self._clock.committed(action.iteration, time.monotonic())
        self._tell_trainer(
            m.SnapshotCommitted(
                epoch=action.epoch,
                iteration=action.iteration,
                replicate_s=replicate_s,
                commit_s=commit_s,
            )
        )

    def _leave(self, action: e.Exit) -> None:
        self._transfers.cancel()  # Before the memory they write to is given back.
        if self._trace is not None:
            self._trace.close()
        if self._leads_from is not None and self._environment.job_file is not None:
            job_file.remove(self._environment.job_file)
        self._exit.set_result(action)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_s)
            self._feed(e.Tick())
            reading = self._board.read()
            stalled = self._vigil.look(reading)
            if stalled:
                self._feed(e.TrainerStalled(iteration=reading.iteration, reason=stalled))

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._check_task)
        return task

    def _check_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    # Finding the job, and being found

    async def _find_job(self) -> tuple[bytes, list[tuple[str, int]]] | None:
        """Token and contacts; None when there is no job within the bound."""
        environment = self._environment
        if environment.forms_job:
            return (environment.token or secrets.token_hex(32)).encode(), []
        deadline = time.monotonic() + self._config.start_timeout_s
        while time.monotonic() < deadline and not self._exit.done():
            if environment.token is not None and environment.contacts:
                return environment.token.encode(), list(environment.contacts)
            found = self._read_job_file()
            if found is not None and found.contacts:
                return (environment.token or found.token).encode(), list(found.contacts)
            await asyncio.sleep(_CONTACT_RETRY_S)
        return None

    def _use_token(self, token: bytes) -> None:
        """A job's file that was there before this job's may have said another."""
        self._token = self._peers.token = self._server.token = self._transfers.token = token

    def _read_job_file(self) -> job_file.JobFile | None:
        path = self._environment.job_file
        return job_file.read(path) if path is not None else None

    async def _find_contact(self) -> None:
        """Until some member answers; the core bounds the wait."""
        said: set[str] = set()
        while True:
            contacts = list(self._environment.contacts)
            found = self._read_job_file()
            if found is not None:
                contacts += found.contacts
                self._use_token((self._environment.token or found.token).encode())
            elif not contacts:  # The file was there when this guardian looked for a job.
                reason = "the job ended before this guardian could join it"
                self._feed(e.EndAsked(exit_code=EXIT_NO_JOB, reason=reason))
                return
            for contact in contacts:
                try:
                    member = await self._peers.find_contact(contact)
                except WireError as error:
                    words = f"no member of the job answers at {format_address(contact)}: {error}"
                    if words not in said:
                        said.add(words)
                        logger.warning("%s; trying on", words)
                    continue
                self._feed(e.Contact(member=member))
                return
            await asyncio.sleep(_CONTACT_RETRY_S)

    def _lead(self, members: tuple[Member, ...]) -> None:
        """This guardian leads: say so once, and have those who come later find it."""
        me = members[0]
        if self._leads_from is None:
            nodes = {member.node for member in members}
            spares = len(nodes) - self._settings.grid.num_nodes
            say(
                f"[deadpool] node {me.node} leads {len(nodes)} nodes, {spares} of them spare, at "
                f"{me.host}:{me.control_port}",
            )
        self._leads_from = me.member
        self._write_job_file(members)

    def _write_job_file(self, members: tuple[Member, ...]) -> None:
        path = self._environment.job_file
        if path is not None:
            contacts = [(member.host, member.control_port) for member in members[:64]]
            job_file.write(path, self._token.decode(), contacts)

    # The trainer process

    async def _start_trainer(self) -> asyncio.StreamReader:
        """What it is told before the connection to it is open, it hears then."""
        self._trainer_ended.clear()
        self._trainer_writer = None
        reader, writer = await asyncio.open_connection(sock=self._zygote.spawn())
        self._trainer_writer = writer
        untold, self._untold = self._untold, []
        for message in untold:
            write_message(writer, message)
        return reader

    def _respawn_trainer(self) -> None:
        """What the old one said last does not count any more."""
        assert self._serving is not None
        self._serving.cancel()
        self._hang_up_on_trainer()
        self._untold = []
        self._board.clear()
        self._vigil.begin()
        self._serving = self._start(self._serve_new_trainer())

    def _hang_up_on_trainer(self) -> None:
        if self._trainer_writer is not None:
            self._trainer_writer.close()
            self._trainer_writer = None

    async def _serve_new_trainer(self) -> None:
        await self._serve_trainer(await self._start_trainer())

    def _on_zygote_news(self) -> None:
        status = self._zygote.read()
        if not self._zygote.is_alive:
            asyncio.get_running_loop().remove_reader(self._zygote.fileno())
        if status is None:
            return
        self._trainer_status = status
        self._trainer_ended.set()
        self._feed(
            e.TrainerDied(
                signal=signal_of(status),
                exit_code=exit_code_of(status),
                can_respawn=self._zygote.is_alive,
                reason=f"its trainer ended with {describe_exit(status)}",
            )
        )

    async def _stop_trainer(self, timeout_s: float) -> None:
        """Wait for its end, then kill it."""
        try:
            await asyncio.wait_for(self._trainer_ended.wait(), timeout_s)
        except asyncio.TimeoutError:
            self._signal_trainer(signal.SIGKILL)
            await self._trainer_ended.wait()

    def _signal_trainer(self, number: int) -> None:
        self._zygote.signal_trainer(number)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGTERM and self._config.drains_on_sigterm:
            self._feed(e.DrainAsked())
        elif self._core is not None:
            self._feed(e.EndAsked(exit_code=128 + number, reason=f"ended by {name}"))
        else:
            if not self._exit.done():
                self._exit.set_result(e.Exit(exit_code=128 + number, reason=""))
            self._signal_trainer(signal.SIGKILL)

    # The trainer's messages

    async def _answer_aborted(self, message: m.TrainerAborted) -> None:
        serving = self._serving
        own = await self._transfers.own(message.live)
        if self._serving is not serving:
            return  # Of a trainer that has ended since.
        self._feed(e.TrainerAborted(epoch=message.epoch, store_port=message.store_port, own=own))

    def _tell_trainer(self, message: m.Message) -> None:
        if self._trainer_writer is None:
            self._untold.append(message)
        else:
            write_message(self._trainer_writer, message)

    async def _serve_trainer(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._on_trainer_message(await read_message(reader))
        except WireError:
            return  # The trainer ended; its process watch says how.

    def _on_trainer_message(self, message: m.Message) -> None:
        match message:
            case m.TrainerUp():
                pass  # Of one that was started anew: it has been told what to do already.
            case m.ArenaLayout():
                self._arena.attach(message.payload_bytes)
            case m.SnapshotWanted():
                self._transfers.deliver(message)
            case m.TrainerAborted():
                self._vigil.answered()
                self._start(self._answer_aborted(message))
            case m.Captured():
                self._feed(e.Captured(epoch=message.epoch, iteration=message.iteration))
            case (
                m.Ready()
                | m.RegroupFailed()
                | m.FirstStep()
                | m.Finished()
                | m.Faltered()
                | m.Failed()
            ):
                self._feed(e.TrainerSaid(message=message))
            case _:
                raise AssertionError(f"{type(message).__name__} from the trainer")
