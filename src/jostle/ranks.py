"""Many processes, one run: which chains are whose, and the little that ranks have to tell each other.

Chains never need each other, so nothing but a few lines of JSON passes between ranks, through the key-value store that
`torch.distributed` meets at: rank 0 decides and the others follow (`Ranks.share`), and what each has to say comes
together there (`Ranks.gather`). Waiting for a slow rank has no limit. A dead one is known by its silence: every rank
gives a sign of life every few seconds, and listens to the next one's.

Where a model is sharded, the ranks that hold it are a `Crew`: they have the same chains, do everything together, and so
have to be of one mind wherever one alone would look at its clock or its weights.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from jostle.errors import InputError, JostleError, RankLostError

BEAT_SECONDS = 2.0
"""How often a rank gives a sign of life."""

SILENCE_SECONDS = 60.0
"""After so long without one, a rank is taken for dead."""

ARRIVAL_SECONDS = 600.0
"""How long the ranks wait for one that has not given any: it may still be loading its model."""

COLLECTIVE_SECONDS = 6 * 3600.0
"""How long a crew waits in what it does together, while its first rank writes a large checkpoint, say."""

POLL_SECONDS = 0.02

FAILED = "failed:"
"""What is said of a rank that ended with an error, whose words follow."""


class EnoughError(Exception):
    """What all ranks alike raise to leave a run where nothing went wrong."""


@contextlib.contextmanager
def leaving_with_enough() -> Iterator[None]:
    """Raise what a caller raised to have no more than the plan, once every rank has left in peace."""
    try:
        yield
    except EnoughError as enough:
        raise enough.__cause__ or enough from None


Value = TypeVar("Value")
_runs = itertools.count()
_alone = ContextVar("alone", default=False)


def join() -> None:
    """Meet the other processes where torchrun, or whoever sets the same variables, started more than one."""
    given = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if dist.is_initialized() or not given or int(os.environ["WORLD_SIZE"]) == 1:
        return
    if torch.cuda.is_available():
        # A scheduler may show each process a single GPU, which is then number 0 to all of them.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    patience = datetime.timedelta(seconds=ARRIVAL_SECONDS)
    store, rank, count = next(rendezvous("env://", timeout=patience))
    # torchrun may restart all ranks and keep the store, with the addresses of those that are gone.
    attempt = distributed_c10d.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=count, timeout=limit)
    if dist.get_rank():
        logging.getLogger("jostle").setLevel(logging.ERROR)


def leads() -> bool:
    """Whether this process is the one that talks: rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def several() -> bool:
    """Whether there are other processes than this one."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _store(prefix: str) -> Any:
    """Where ranks write down what is for each other."""
    return distributed_c10d.PrefixStore(f"jostle/{prefix}", distributed_c10d._get_default_store())


def speaks() -> str | None:
    """How to begin the message that a failed run ends with; None where another rank has given one."""
    if not several():
        return ""
    own = str(dist.get_rank())
    with contextlib.suppress(dist.DistError):  # without the store, better twice than not at all
        if _store("end").compare_set("spoke", "", own).decode() != own:
            return None
    return f"rank {own}: "


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let what this process samples be its own, whatever others there are: a pilot, say."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


class Crew:
    """The processes that hold one model together; without a mesh of them, this one alone.

    Attributes:
        mesh: of `torch.distributed`.
        rank: which of them this is.
        count: how many there are.
    """

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh
        self.rank, self.count = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Return whether it holds for one of them, at least."""
        return flag if self.mesh is None else bool(self._reduced(torch.tensor(int(flag)), dist.ReduceOp.MAX))

    def all(self, flags: Tensor) -> Tensor:
        """Return what holds for every one of them."""
        return flags if self.mesh is None else self._reduced(flags.int(), dist.ReduceOp.MIN).bool()

    def slowest(self, seconds: float) -> float:
        """Return what took the longest of them so long."""
        return seconds if self.mesh is None else self._reduced(torch.tensor(seconds), dist.ReduceOp.MAX).item()

    def sum(self, values: Tensor) -> Tensor:
        """Return what all of them have, added up."""
        return values if self.mesh is None else self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, value: Tensor, operation: Any) -> Tensor:
        assert self.mesh is not None
        value = value.to(self.mesh.device_type, copy=True)
        dist.all_reduce(value, operation, group=self.mesh.get_group())
        return value


class Ranks:
    """The processes that share a run; without torch.distributed, this one alone.

    A context manager: on whatever error a rank leaves, the others learn of it and stop at a checkpoint.

    Args:
        shards: over how many ranks each model is spread.

    Attributes:
        rank: which of them this is.
        count: how many there are.
        crew: those that hold this rank's model.
        crews: how many models, and so how many chains at a time, there are.
        interrupted: asked while waiting.
    """

    def __init__(self, shards: int = 1) -> None:
        join()
        together = several() and not _alone.get()
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        if self.count % shards:
            raise InputError(
                "shards",
                got=f"{shards} with {self.count} rank{'s' if self.count > 1 else ''}",
                expected="a divisor of the number of ranks",
                fix=f"torchrun --nproc-per-node {shards} -m jostle run ...",
            )
        self.crews, self.crew = self.count // shards, Crew()
        if shards > 1:
            from torch.distributed.device_mesh import init_device_mesh

            kind = "cuda" if torch.cuda.is_available() else "cpu"
            mesh = init_device_mesh(kind, (self.crews, shards), mesh_dim_names=("chains", "shards"))
            self.crew = Crew(mesh["shards"])
        self.interrupted: Callable[[], bool] = lambda: False
        self._turn = itertools.count()
        self._lost: str | None = None
        self.laid_out = False
        """Whether there is a run to go on with."""
        self._leaving = threading.Event()
        if self.count > 1:
            self._store = _store(f"run/{next(_runs)}")
            self._signs = threading.Thread(target=self._give_signs, name="jostle-signs", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    @property
    def first_crew(self) -> bool:
        """Whether this rank is of the crew that rank 0 is in, and takes part in whatever it tries."""
        return self.rank < self.crew.count

    @property
    def lost(self) -> bool:
        """Whether a rank was lost, so that the others should stop."""
        return self._lost is not None

    def chains(self, chains: int, at_once: int) -> list[int]:
        """Return which of a run's chains are this rank's: whole groups of those that move side by side.

        Which chains are side by side can change their last bits, and does not depend on the number of ranks here.
        """
        number = self.rank // self.crew.count
        return [chain for chain in range(chains) if chain // at_once % self.crews == number]

    def share(self, decide: Callable[[], Value]) -> Value:
        """Return on every rank what rank 0 decides, which has to be plain data."""
        if self.count == 1:
            return decide()
        key = f"shared/{next(self._turn)}"
        if self.leads:
            decided = decide()
            self._tell(key, decided)
            return decided
        return self._wait(key)

    def gather(self, value: Value) -> list[Value]:
        """Return, on rank 0, what every rank has; on the others nothing, and at once."""
        if self.count == 1:
            return [value]
        turn = next(self._turn)
        if self.leads:
            return [value, *(self._wait(f"gathered/{turn}/{rank}") for rank in range(1, self.count))]
        self._tell(f"gathered/{turn}/{self.rank}", value)
        return []

    def __enter__(self) -> Self:
        if self.count > 1:
            self._signs.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.count == 1:
            return
        try:
            if error is None or isinstance(error, EnoughError):
                self.share(lambda: None)  # rank 0 may host the store, and is the last to leave
                if not self.leads:
                    self._leave()
                self.gather(None)
                return
            with contextlib.suppress(dist.DistError):  # where there is nobody left to tell
                if not isinstance(error, RankLostError):
                    reason = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"{FAILED} {error}"
                    self._report(self.rank, f"{reason} ({socket.gethostname()})")
                self._await_hearing()
        finally:
            self._leave()

    @contextlib.contextmanager
    def watching_the_crew(self) -> Iterator[None]:
        """Name the rank whose death broke off what a crew did together."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:  # what a collective raises depends on its backend
            if self.crew.count == 1 or isinstance(error, (JostleError, EnoughError)):
                raise
            self.raise_if_lost(within=SILENCE_SECONDS + 3 * BEAT_SECONDS)
            if self.interrupted():  # torchrun stops everybody when one is gone
                raise KeyboardInterrupt from error
            raise

    def _await_hearing(self) -> None:
        """Give the others the time to hear of a loss, where what they hear it through goes with this process."""
        if not self.leads or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        others = [f"heard/{rank}" for rank in range(self.count) if rank != self.rank]
        deadline = time.monotonic() + 3 * BEAT_SECONDS
        while not self._store.check(others) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _leave(self) -> None:
        self._leaving.set()
        self._signs.join()

    def _tell(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except dist.DistError as error:
            raise self._store_gone() from error

    def _wait(self, key: str) -> Any:
        try:
            while not self._store.check([key]):
                if self.interrupted():
                    raise KeyboardInterrupt
                self.raise_if_lost()
                time.sleep(POLL_SECONDS)
            return json.loads(self._store.get(key))
        except dist.DistError as error:
            raise self._store_gone() from error

    def raise_if_lost(self, *, within: float = 0.0) -> None:
        """Stop where another rank was lost; ``within`` so many seconds, where others may know of it already."""
        deadline = time.monotonic() + within
        while self._lost is None and not self.interrupted() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if self._lost is not None:
            raise self._stopped(self._lost)

    def _store_gone(self) -> RankLostError:
        self._lost = self._lost or f"rank 0 of {self.count} or its machine is gone"
        return self._stopped(self._lost)

    def _stopped(self, lost: str) -> RankLostError:
        """What is said of a loss. What failed may fail again; and where no run was laid out, none goes on."""
        if not self.laid_out:
            return RankLostError(lost)
        kept = "what was recorded is kept"
        then = "" if FAILED in lost else ", and the same command, on any number of ranks, goes on from the checkpoints"
        return RankLostError(f"{lost}; {kept}{then}")

    def _report(self, rank: int, what: str) -> None:
        """Tell everybody that a rank is lost; of several the first told is what they hear."""
        self._lost = self._store.compare_set("lost", "", f"rank {rank} of {self.count} {what}").decode()

    def _give_signs(self) -> None:
        """Say every few seconds that this rank lives, and notice when the next one does not."""
        following = (self.rank + 1) % self.count
        heard, since, limit = b"", time.monotonic(), ARRIVAL_SECONDS
        for beat in itertools.count():
            try:
                self._store.set(f"sign/{self.rank}", str(beat))
                now = self._store.get(f"sign/{following}") if self._store.check([f"sign/{following}"]) else b""
                if now != heard:
                    heard, since, limit = now, time.monotonic(), SILENCE_SECONDS
                elif time.monotonic() - since > limit:
                    self._report(following, f"has given no sign of life for {limit:.0f} s")
                if self._store.check(["lost"]):
                    self._lost = self._store.get("lost").decode()
                    self._store.set(f"heard/{self.rank}", "")
            except dist.DistError:
                self._store_gone()
                return
            if self._leaving.wait(BEAT_SECONDS):
                return
