"""Runs the leader: connections in, decisions out, one line and one JSON record per swap."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from deadpool import messages as m
from deadpool.config import DeadpoolConfig
from deadpool.injection import append_json_line
from deadpool.protocol import leader as protocol
from deadpool.protocol.leader import Leader
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import Epoch, Member, MemberId, Node, Phase
from deadpool.swap_report import SwapReport
from deadpool.wire import WireError, read_message, write_message

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0

EXIT_FENCED = 72
"""Exit code of a guardian whose node counts as lost."""


class Coordinator:
    """The leader of one job and its connections. Every method runs on one event loop.

    fence: called for a node that is out of the job; must end whatever still runs of it.
    """

    def __init__(
        self,
        *,
        config: DeadpoolConfig,
        grid: Grid,
        num_spare_nodes: int,
        token: str,
        fence: Callable[[Node], None],
    ) -> None:
        self._config = config
        self._token = token
        self._fence = fence
        self._leader = Leader(grid=grid, num_spare_nodes=num_spare_nodes)
        self._guardians: dict[MemberId, tuple[Node, asyncio.StreamWriter]] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._next_member = 1
        self._ended: asyncio.Future[protocol.SendEnd] = asyncio.get_running_loop().create_future()
        self._report: SwapReport | None = None
        self._lost_at: float | None = None

    async def listen(self, host: str) -> tuple[str, int]:
        """Start to accept guardians; returns the address."""
        self._server = await asyncio.start_server(self._accept, host, 0, family=socket.AF_INET)
        self._set_deadline(Epoch(0), Phase.FORMING, self._config.start_timeout_s)
        return self._server.sockets[0].getsockname()[:2]

    async def wait_end(self) -> tuple[int, str]:
        """Exit code and reason of the job's end. Guardians have been told."""
        end = await self._ended
        return end.exit_code, end.reason

    async def wait_disconnected(self, timeout_s: float) -> None:
        """Until every guardian has gone, or the bound has passed."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=timeout_s)

    async def close(self) -> None:
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def is_over(self) -> bool:
        return self._leader.is_over

    def drain(self) -> None:
        """Ask every trainer to save and finish."""
        for _, writer in self._guardians.values():
            write_message(writer, m.Drain())

    def end(self, exit_code: int, reason: str) -> None:
        """End the job from outside (Ctrl-C, nodes that never came)."""
        self._carry_out(self._leader.end(exit_code, reason))

    # Connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        member_id: MemberId | None = None
        try:
            hello = await asyncio.wait_for(read_message(reader), _HELLO_TIMEOUT_S)
            if not isinstance(hello, m.Hello) or not self._is_ours(hello.token):
                raise WireError("not a guardian of this job")
            member_id = self._admit(hello, writer)
            while True:
                self._take(member_id, await read_message(reader))
        except asyncio.TimeoutError:
            logger.warning("refused a connection that said nothing for %g s", _HELLO_TIMEOUT_S)
        except WireError as error:
            if member_id is None:
                logger.warning("refused a connection: %s", error)
            else:
                self._lose(member_id, "its guardian's connection ended")
        except asyncio.CancelledError:
            pass  # `close` ends this connection.
        except Exception:  # The task's outermost frame: a bug of ours must not go on in silence.
            logger.exception("the leader failed on a guardian's message")
            self.end(1, "internal error of the leader")
        finally:
            self._connections.discard(task)
            if member_id is not None:
                self._guardians.pop(member_id, None)
            writer.close()

    def _is_ours(self, token: str) -> bool:
        # As bytes: compare_digest refuses text beyond ASCII.
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _admit(self, hello: m.Hello, writer: asyncio.StreamWriter) -> MemberId:
        member_id = MemberId(self._next_member)
        self._next_member += 1
        self._guardians[member_id] = (Node(hello.node), writer)
        write_message(writer, m.Welcome(member=member_id))
        member = Member(
            member=member_id,
            node=Node(hello.node),
            local_rank=hello.local_rank,
            host=hello.host,
            data_port=hello.data_port,
        )
        self._feed(protocol.Joined(member=member))
        return member_id

    def _take(self, member: MemberId, message: m.AnyMessage) -> None:
        """A guardian's message becomes an event."""
        match message:
            case m.Aborted():
                self._feed(
                    protocol.Aborted(
                        member=member,
                        epoch=message.epoch,
                        store_port=message.store_port,
                        holdings=message.holdings,
                    )
                )
            case m.Ready():
                if self._report is not None:
                    self._report.take_ready(message)
                self._feed(protocol.Ready(member=member, epoch=message.epoch))
            case m.RegroupFailed():
                self._feed(
                    protocol.RegroupFailed(
                        member=member, epoch=message.epoch, reason=message.reason
                    )
                )
            case m.Staged():
                self._feed(
                    protocol.Staged(member=member, epoch=message.epoch, iteration=message.iteration)
                )
            case m.FirstStep():
                self._take_first_step(message)
            case m.Finished():
                self._feed(protocol.Finished(member=member, epoch=message.epoch))
            case m.TrainerLost():
                self._lose(member, message.reason)
            case m.Failed():
                self._feed(
                    protocol.Failed(
                        member=member, reason=message.reason, exit_code=message.exit_code
                    )
                )
            case _:
                raise WireError(f"{type(message).__name__} from a guardian")

    def _lose(self, member: MemberId, reason: str) -> None:
        if self._leader.phase is not Phase.COMPLETED:
            self._lost_at = time.monotonic()
        self._feed(protocol.Lost(member=member, reason=reason))

    # Decisions

    def _feed(self, event: protocol.Event) -> None:
        self._carry_out(self._leader.handle(event))

    def _carry_out(self, actions: list[protocol.Action]) -> None:
        for action in actions:
            match action:
                case protocol.SendAbort():
                    for member in action.members:
                        opens_store = member == action.store_member
                        self._send(member, m.Abort(epoch=action.epoch, opens_store=opens_store))
                case protocol.SendPlan():
                    if self._report is not None:
                        self._report.take_plan(action.plan)
                    for member in action.members:
                        self._send(member, m.NewPlan(plan=action.plan))
                case protocol.SendResume():
                    for member in action.members:
                        self._send(member, m.Resume(epoch=action.epoch))
                case protocol.SendCommitted():
                    committed = m.Committed(epoch=action.epoch, iteration=action.iteration)
                    for member in action.members:
                        self._send(member, committed)
                case protocol.SendEnd():
                    for member in action.members:
                        end = m.End(exit_code=action.exit_code, reason=action.reason)
                        self._send(member, end)
                    if self._leader.is_over and not self._ended.done():
                        self._ended.set_result(action)
                case protocol.Fence():
                    self._dismiss(action.node)
                    self._fence(action.node)
                case protocol.SetDeadline():
                    self._set_deadline(action.epoch, action.phase, self._bound())
                case protocol.EnterPhase():
                    self._enter(action.epoch, action.phase)

    def _dismiss(self, node: Node) -> None:
        """Guardians of a lost node that still listen are told to end."""
        for member, (where, writer) in self._guardians.items():
            if where == node:
                logger.debug("member %d of node %d is dismissed", member, node)
                write_message(writer, m.End(exit_code=EXIT_FENCED, reason="the node was lost"))

    def _send(self, member: MemberId, message: m.Message) -> None:
        if member in self._guardians:
            write_message(self._guardians[member][1], message)

    def _bound(self) -> float:
        if self._leader.committed is None:
            return self._config.start_timeout_s
        return self._config.recovery_timeout_s

    def _set_deadline(self, epoch: Epoch, phase: Phase, seconds: float) -> None:
        event = protocol.DeadlinePassed(epoch=epoch, phase=phase)
        asyncio.get_running_loop().call_later(seconds, self._feed, event)

    # Reports

    def _enter(self, epoch: Epoch, phase: Phase) -> None:
        logger.debug("epoch %d: %s", epoch, phase.value)
        if phase is Phase.ABORTING and self._leader.nodes_lost:
            now = time.monotonic()
            previous = self._report
            self._report = SwapReport(
                epoch=epoch,
                nodes_lost=list(self._leader.nodes_lost),
                lost_at=previous.lost_at if previous else self._lost_at or now,
                announced_at=now,
                killed_at=self._injected_kill(),
            )
        elif self._report is not None:
            self._report.enter(phase, time.monotonic())

    def _injected_kill(self) -> float | None:
        """When the last injected fault struck, by the clock that all processes of one machine
        share; None for a fault of another origin."""
        if self._config.log_dir is None or not self._config.inject:
            return None
        try:
            with open(os.path.join(self._config.log_dir, "injections.jsonl")) as file:
                last = json.loads(file.readlines()[-1])
        except (OSError, IndexError):
            return None
        return float(last["monotonic_s"]) if last["node"] in self._leader.nodes_lost else None

    def _take_first_step(self, message: m.FirstStep) -> None:
        report = self._report
        if report is None or message.epoch != report.epoch:
            return
        report.take_first_step(message)
        if report.num_first_steps < len(self._leader.slots):
            return
        self._report = None
        self._leader.forget_losses()
        print(report.line(), flush=True)
        self.write_event(report.record())

    def write_event(self, record: dict[str, Any]) -> None:
        if self._config.log_dir is not None:
            append_json_line(os.path.join(self._config.log_dir, "events.jsonl"), record)
