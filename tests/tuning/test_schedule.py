"""Schedules played step by step: every number in a wait is enough, no word is too many, and broken orders are caught.

`Play` knows the rules of the hardware and of the rings, and nothing of how `steps` counts. It walks several blocks of
queries as both warpgroups do, in the same order, and complains about the first thing that would give wrong gradients.
"""

import itertools
import re

import pytest

from cute_fa.tuning import schedule
from cute_fa.tuning.schedule import Step

NUM_BLOCKS = 5  # more than twice the stages of every ring
NUM_STAGES = 2  # of the rings of Q and dO, and of the buffers of P and dS

SCHEDULES = {
    name.lower().replace("_", "-"): words
    for name, words in vars(schedule).items()
    if name.isupper() and isinstance(words, str) and name != "SHARED_PROLOGUE"
}
SUBSETS = {
    "-".join(name for name, needed in zip(("dq", "dk", "dv"), needs) if needed): needs
    for needs in itertools.product((True, False), repeat=3)
    if any(needs)
}

by_schedule = pytest.mark.parametrize("words", SCHEDULES.values(), ids=SCHEDULES)
by_subset = pytest.mark.parametrize("needs", SUBSETS.values(), ids=SUBSETS)


def is_shared(words: str) -> bool:
    """Whether P and dS are operands from shared memory."""
    return words == schedule.SHARED


def test_landings_are_said_once_and_only_where_they_count():
    said = schedule.without(schedule.SHARED, True, True, True, True, has_landings=True)
    assert said == schedule.SHARED and said.split().count("landed") == 1, "in a fixed order from registers"
    for needs in SUBSETS.values():
        assert "landed" not in schedule.without(schedule.SHARED, *needs, True), "nobody counts"
    assert "landed" not in schedule.without(schedule.SHARED, False, True, True, True, has_landings=True), "no dQ"


class Play:
    """Registers and buffers by name, each with what it holds: (kind, block of queries), halves where it has two.

    A product reads and writes from when it is issued until a wait says that it is done; products end in their order.
    """

    def __init__(self, needs, is_shared: bool, num_buffers: int = NUM_STAGES):
        self.needs, self.is_shared, self.num_buffers = needs, is_shared, num_buffers
        self.holds, self.running, self.num_syncs = {}, [], 0
        self.stored, self.last_read = {}, {}  # buffers in shared memory: count of syncs at a store, at a read's end
        self.read_of_stage = {}  # (ring, block): the products of the block that read the stage
        self.freed, self.added = [], []

    def walk(self, prologue: tuple[Step, ...], steps: tuple[Step, ...]):
        for step in prologue:
            self.do(step, -1)
        for block in range(NUM_BLOCKS):
            for step in steps:
                self.do(step, block)
        running = [product for product, *_ in self.running]
        assert not running, f"{running} still run at the end"
        needs_dq, needs_dk, needs_dv = self.needs
        blocks, halves = range(NUM_BLOCKS), (0, 1)
        wanted = [("dQ", block) for block in blocks if needs_dq]
        wanted += [(name, block, half) for name, needed in (("dK", needs_dk), ("dV", needs_dv)) if needed
                   for block in blocks for half in halves]  # fmt: skip
        assert sorted(self.added, key=str) == sorted(wanted, key=str), f"not added once for each block: {self.added}"
        assert sorted(self.freed) == sorted(itertools.product(("Q", "dO"), blocks)), f"not freed once: {self.freed}"

    def do(self, step: Step, block: int):
        halves = (0, 1) if step.half is None else (step.half,)
        if step.word == "wait":
            self.wait(step.num_in_flight)
        elif step.word.removeprefix("next_") in ("S", "dP", "dV", "dQ", "dK"):
            is_next = step.word.startswith("next_")
            self.issue(step.word.removeprefix("next_"), block + is_next, halves)
        elif step.word in ("lse", "next_lse"):
            self.read_stage("Q", block + (step.word == "next_lse"), "lse")
            self.write("statistics" if not self.is_shared else "LSE", ("lse", block + (step.word == "next_lse")))
        elif step.word == "delta":
            self.read_stage("dO", block, "delta")
            self.write("statistics" if not self.is_shared else "delta", ("delta", block))
        elif step.word == "P":
            self.read("LSE" if self.is_shared else "statistics", ("lse", block), "P")
            for half in halves:
                self.read(f"acc_S {half}", ("S", block), "P")
                self.write(f"acc_S {half}", ("P", block))
                self.write(f"rP {half}", ("P", block))
        elif step.word == "dS":
            self.read("delta" if self.is_shared else "statistics", ("delta", block), "dS")
            for half in halves:
                for name in ("acc_S", "rP"):  # of either kind of arithmetic
                    self.read(f"{name} {half}", ("P", block), "dS")
                self.read(f"acc_dP {half}", ("dP", block), "dS")
                self.write(f"acc_dP {half}", ("dS", block))
                self.write(f"rdS {half}", ("dS", block))
        elif step.word in ("store_P", "store_dS"):
            self.store(step.word.removeprefix("store_"), block)
        elif step.word == "sync":
            self.num_syncs += 1
        elif step.word == "store_dQ":
            self.read("acc_dQ", ("dQ", block), "store_dQ")
            self.added.append(("dQ", block))
        else:
            self.free(step.word.removeprefix("free_"), block)

    def issue(self, product: str, block: int, halves):
        """dQ, and in the shared kind every product with P or dS, reads what both warpgroups have stored."""
        operand = {"dV": "P", "dK": "dS", "dQ": "dS"}.get(product)
        reads, accumulator = [], f"acc_{product}"
        writes = [f"{accumulator} 0", f"{accumulator} 1"] if product in ("S", "dP") else [accumulator]
        if operand and (self.is_shared or product == "dQ"):
            buffer = f"s{operand} {block % self.num_buffers}"
            self.read(buffer, (operand, block), product)
            assert self.stored[buffer] < self.num_syncs, f"{product} reads {buffer} without a sync behind its store"
            reads.append(buffer)
        elif operand:
            for half in halves:
                self.read(f"r{operand} {half}", (operand, block), product)
                reads.append(f"r{operand} {half}")
        ring = {"S": "Q", "dK": "Q", "dP": "dO", "dV": "dO"}.get(product)
        if ring:
            self.read_stage(ring, block, product)
        for name in writes:
            self.holds[name] = (product, block)
        if product in ("dK", "dV"):
            self.added += [(product, block, half) for half in halves]
        self.running.append((product, block, reads, writes))

    def wait(self, num_in_flight: int):
        while len(self.running) > num_in_flight:
            *_, reads, _ = self.running.pop(0)
            self.last_read |= {name: self.num_syncs for name in reads if name.startswith("s")}

    def read(self, name: str, wanted, by: str):
        writers = [product for product, _, _, writes in self.running if name in writes]
        assert not writers, f"{by} reads {name} while {writers[0]} runs"
        assert self.holds.get(name) == wanted, f"{by} reads {wanted} from {name}, which holds {self.holds.get(name)}"

    def write(self, name: str, value):
        users = [product for product, _, reads, writes in self.running if name in (*reads, *writes)]
        assert not users, f"{name} is overwritten while {users[0]} runs"
        self.holds[name] = value

    def store(self, operand: str, block: int):
        """The other warpgroup may lag behind by what it does between two syncs."""
        buffer = f"s{operand} {block % self.num_buffers}"
        for half in (0, 1):
            self.read(f"r{operand} {half}", (operand, block), f"store_{operand}")
        self.write(buffer, (operand, block))
        is_read = self.last_read.get(buffer, -1) < self.num_syncs
        assert is_read, f"{buffer} is overwritten with no sync behind its last read"
        self.stored[buffer] = self.num_syncs

    def read_stage(self, ring: str, block: int, by: str):
        """A stage fills when the block two before has freed it. The look ahead of the last block reads what is left."""
        assert (ring, block) not in self.freed, f"{by} reads a stage of {ring} that is free"
        is_filled = block < NUM_STAGES or block == NUM_BLOCKS or (ring, block - NUM_STAGES) in self.freed
        assert is_filled, f"{by} waits for {ring} of block {block} for ever"
        self.read_of_stage.setdefault((ring, block), set()).add(by)

    def free(self, ring: str, block: int):
        needs_ds, needs_dk, needs_dv = self.needs[0] or self.needs[1], *self.needs[1:]
        readers = {"Q": [("S", True), ("lse", True), ("dK", needs_dk)],
                   "dO": [("dP", needs_ds), ("delta", needs_ds), ("dV", needs_dv)]}[ring]  # fmt: skip
        missing = {by for by, needed in readers if needed} - self.read_of_stage.get((ring, block), set())
        assert not missing, f"{ring} is freed before {missing} read it"
        running = {product for product, of_block, *_ in self.running if of_block == block} & {by for by, _ in readers}
        assert not running, f"{ring} is freed while {running} run"
        self.freed.append((ring, block))


def play(words: str, needs=(True, True, True), shared: bool = False, num_buffers: int = NUM_STAGES):
    prologue, _ = schedule.steps(schedule.SHARED_PROLOGUE if shared else "")
    Play(needs, shared, num_buffers).walk(prologue, schedule.steps(words)[0])


def test_all_schedules_are_played():
    assert set(SCHEDULES) == {"dp-first", "half-dk", "shared"}, "of the module"


@by_subset
@by_schedule
def test_nothing_is_read_too_early_or_overwritten_too_early(words, needs):
    shared = is_shared(words)
    play(schedule.without(words, *needs, shared), needs, shared)
    assert schedule.steps(schedule.without(words, *needs, shared))[1] == (), "what a step leaves in flight"


@by_subset
@by_schedule
def test_every_step_is_needed(words, needs):
    """Without any one of its steps, and with any one of its waits let off one product earlier, a schedule fails."""
    shared = is_shared(words)
    prologue, _ = schedule.steps(schedule.SHARED_PROLOGUE if shared else "")
    steps, _ = schedule.steps(schedule.without(words, *needs, shared))
    for i, step in enumerate(steps):
        changes = {"left out": ()}
        if step.word == "wait":
            changes["for one less"] = (step._replace(num_in_flight=step.num_in_flight + 1),)
        for change, instead in changes.items():
            try:
                Play(needs, shared).walk(prologue, (*steps[:i], *instead, *steps[i + 1 :]))
            except AssertionError:
                continue
            pytest.fail(f"step {i}, {step}, {change}: nothing is wrong")


# What serves which of dq, dk, dv; S and its exponentials, and the stages, serve all.
SERVES = {"dV": "v", "dK": "k", "dQ": "q", "store_dQ": "q", "dP": "qk", "delta": "qk", "dS": "qk", "store_P": "v"}
SERVES_FROM_REGISTERS = SERVES | {"store_dS": "q", "sync": "q"}
SERVES_FROM_SHARED_MEMORY = SERVES | {"store_dS": "qk"}


@by_subset
@by_schedule
def test_a_gradient_takes_along_what_only_serves_it(words, needs):
    needed = {letter for letter, is_needed in zip("qkv", needs) if is_needed}
    serves = SERVES_FROM_SHARED_MEMORY if is_shared(words) else SERVES_FROM_REGISTERS
    of_all = [word for word in words.split() if not word.startswith(("wait", "landed"))]
    wanted = [word for word in of_all if needed & set(serves.get(word.partition(":")[0], "qkv"))]
    left = schedule.without(words, *needs, is_shared(words)).split()
    assert [word for word in left if not word.startswith("wait")] == wanted, "words but waits, in their order"


# What each wait leaves in flight, counted by hand.
WAITS = {
    "dp-first": (1, 0, 2, 1, 0),
    "half-dk": (1, 2, 3, 1, 0),
    "shared": (0, 2, 1, 1, 0),
}


@pytest.mark.parametrize("name", WAITS)
def test_numbers_of_waits(name):
    steps, _ = schedule.steps(SCHEDULES[name])
    assert tuple(step.num_in_flight for step in steps if step.word == "wait") == WAITS[name], "groups of products"


def test_words_become_steps():
    steps, running = schedule.steps("S dV:0 wait:S dV:1 wait:dP next_S store_dQ")
    wanted = ("S", None, 0), ("dV", 0, 0), ("wait", None, 1), ("dV", 1, 0), ("next_S", None, 0), ("store_dQ", None, 0)
    assert steps == wanted, "word, half, products still running; none for a product that never ran"
    assert running == ("dV", "dV", "S"), "oldest first"


def swapped(words: str, first: str, second: str) -> str:
    """`words` with two of them in each other's place."""
    exchange = {first: second, second: first}
    return " ".join(exchange.get(word, word) for word in words.split())


# The order in which the formulas stand.
PLAIN = "S lse dP wait:S P delta dV wait:dP dS store_dS sync dQ dK wait:dV free_dO wait:dQ store_dQ wait:dK free_Q"
HALF_DK, SHARED = schedule.HALF_DK, schedule.without(schedule.SHARED, True, True, True, True)

# name: (words, whether P is shared, number of buffers, what is wrong)
BROKEN = {
    "no-wait-for-s": (PLAIN.replace("wait:S ", ""), False, 2, "P reads acc_S 0 while S runs"),
    "no-wait-for-dp": (PLAIN.replace("wait:dP ", ""), False, 2, "dS reads acc_dP 0 while dP runs"),
    "no-wait-for-dq": (PLAIN.replace("wait:dQ ", ""), False, 2, "store_dQ reads acc_dQ while dQ runs"),
    "wait-for-dq-behind-its-store": (swapped(PLAIN, "wait:dQ", "store_dQ"), False, 2, "store_dQ reads acc_dQ while"),
    "do-freed-under-dv": (swapped(PLAIN, "wait:dV", "free_dO"), False, 2, "dO is freed while {'dV'} run"),
    "q-freed-under-dk": (swapped(PLAIN, "wait:dK", "free_Q"), False, 2, "Q is freed while {'dK'} run"),
    "q-freed-before-dk": (swapped(PLAIN, "dQ", "free_Q"), False, 2, "Q is freed before {'dK'} read it"),
    "dv-before-p": (swapped(PLAIN, "P", "dV"), False, 2, "dV reads ('P', 0) from rP 0, which holds None"),
    "dk-before-ds": (swapped(HALF_DK, "dS:0", "dK:0"), False, 2, "dK reads ('dS', 0) from rdS 0, which holds None"),
    "half-of-dv-before-its-p": (swapped(HALF_DK, "P:1", "dV:1"), False, 2, "from rP 1, which holds None"),
    "delta-over-lse": (swapped(PLAIN, "P", "delta"), False, 2, "P reads ('lse', 0) from statistics"),
    "dq-before-sync": (swapped(PLAIN, "sync", "dQ"), False, 2, "dQ reads sdS 0 without a sync"),
    "ds-stored-behind-sync": (swapped(PLAIN, "sync", "store_dS"), False, 2, "dQ reads sdS 0 without a sync"),
    "one-buffer": (PLAIN, False, 1, "sdS 0 is overwritten with no sync behind its last read"),
    "shared-one-buffer": (SHARED, True, 1, "sP 0 is overwritten with no sync behind its last read"),
    "shared-p-not-stored": (SHARED.replace("store_P ", ""), True, 2, "from sP 0, which holds None"),
    "shared-no-sync": (SHARED.replace("sync ", ""), True, 2, "dV reads sP 0 without a sync"),
    "shared-dv-before-sync": (swapped(SHARED, "sync", "dV"), True, 2, "dV reads sP 0 without a sync"),
    "shared-next-s-over-p": (swapped(SHARED, "delta", "next_S"), True, 2, "P reads acc_S 0 while S runs"),
    "shared-next-s-behind-free-q": (swapped(SHARED, "next_S", "free_Q"), True, 2, "Q is freed while {'dK'} run"),
    "shared-no-wait-for-next-s": (SHARED.removesuffix(" wait:S"), True, 2, "P reads acc_S 0 while S runs"),
    "shared-next-lse-over-lse": (swapped(SHARED, "delta", "next_lse"), True, 2, "P reads ('lse', 0) from LSE"),
}


@pytest.mark.parametrize("words, shared, num_buffers, complaint", BROKEN.values(), ids=BROKEN)
def test_broken_orders_are_caught(words, shared, num_buffers, complaint):
    with pytest.raises(AssertionError, match=re.escape(complaint)):
        play(words, shared=shared, num_buffers=num_buffers)


def test_operands_of_running_products_are_kept():
    """No order of words gets there, because S of the next block ends behind all that read P of this one."""
    game = Play((True, True, True), is_shared=False)
    game.holds |= {f"{name} {half}": (name[1:], 0) for name in ("rP", "rdS") for half in (0, 1)}
    game.issue("dV", 0, (0,))
    game.issue("dK", 0, (0, 1))
    game.write("rP 1", ("P", 1))
    with pytest.raises(AssertionError, match="rP 0 is overwritten while dV runs"):
        game.write("rP 0", ("P", 1))
    game.wait(1)
    game.write("rP 0", ("P", 1))
    with pytest.raises(AssertionError, match="rdS 0 is overwritten while dK runs"):
        game.write("rdS 0", ("dS", 1))
