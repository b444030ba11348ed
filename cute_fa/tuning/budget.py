"""Budget: shared memory and registers of a forward or backward tile, and how a CTA splits its registers.

Plans ask it before anything compiles. It counts what is certain from the sizes alone; whether ptxas finds a schedule
without spills is decided by compiling, and each kernel's tests do.

A CTA is one producer warpgroup (TMA) and two or three consumer warpgroups (MMA, softmax). Operands are 16 bits wide,
accumulators fp32.
"""

from dataclasses import dataclass

from cute_fa.core.hardware import MAX_SMEM_BYTES_PER_BLOCK, REGISTERS_PER_SM, WARPGROUP_THREADS

OPERAND_BYTES = 2
FP32_BYTES = 4
MBARRIER_BYTES = 8

BACKWARD_STAGES = 2  # of its rings and of dS: the next block is loaded, or written, while one is used
BACKWARD_WARPGROUPS = 2  # consumers

CONVERTERS = 2  # warps of a CTA that turn dQ into rows
CHUNK_VECTORS = 4  # of 16 bytes a thread of a warpgroup: what a converter reads at a time
CHUNK_BYTES = CHUNK_VECTORS * 16 * WARPGROUP_THREADS

# The 128-byte swizzle of TMA and wgmma repeats every 1024 bytes of address, so each buffer of tiles starts there.
SMEM_ALIGNMENT = 1024

# What a consumer thread holds beside matrices: addresses, row statistics, ring indices, loop counters. Forward tiles that
# leave 32 registers for it compile without spills (ptxas 13.4), tiles that leave 20 spill; backward tiles that leave 32 need
# the right schedule, or spill in spite of it (`tuning/heuristics.py`).
OTHER_REGISTERS = 32


@dataclass(frozen=True)
class RegisterSplit:
    """Registers per thread: at launch, and after setmaxnreg of the producer and of the consumer warpgroups."""

    num_consumer_warpgroups: int
    launch: int
    producer: int
    consumer: int

    @property
    def fits(self) -> bool:
        """Whether an SM can launch the CTA, and setmaxnreg, which only moves what was launched, can be served."""
        launched = (1 + self.num_consumer_warpgroups) * self.launch
        needed = self.producer + self.num_consumer_warpgroups * self.consumer
        return needed <= launched <= REGISTERS_PER_SM // WARPGROUP_THREADS


REGISTER_SPLITS = {
    2: RegisterSplit(2, launch=168, producer=24, consumer=240),
    3: RegisterSplit(3, launch=128, producer=32, consumer=160),
}


@dataclass(frozen=True)
class ForwardTile:
    """tile_m queries against a stream of blocks of tile_n keys. P stays in registers.

    num_kv_stages: of the ring of K and of the ring of V. has_o_staging: O gets a buffer on its way to TMA; False if it is
    stored from registers.
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    num_consumer_warpgroups: int
    num_q_stages: int = 1
    num_kv_stages: int = 2
    has_o_staging: bool = True

    @property
    def smem_bytes(self) -> int:
        """Q, K and V rings, O, and the full and the empty mbarrier of every stage.

        The barriers take a whole alignment unit, in which a scheduler's few words of tile coordinates find room.
        """
        q = _buffer_bytes(self.num_q_stages, self.tile_m, self.head_dim)
        k = _buffer_bytes(self.num_kv_stages, self.tile_n, self.head_dim)
        v = _buffer_bytes(self.num_kv_stages, self.tile_n, self.head_dim_v)
        o = _buffer_bytes(int(self.has_o_staging), self.tile_m, self.head_dim_v)
        num_stages = self.num_q_stages + 2 * self.num_kv_stages
        return q + k + v + o + _align(2 * num_stages * MBARRIER_BYTES)

    @property
    def registers_per_thread(self) -> int:
        """Of a consumer thread, for S, P (16 bits) and O, which all live while P V runs under the next Q K^T."""
        s = _registers(self.tile_m, self.tile_n, self.num_consumer_warpgroups)
        o = _registers(self.tile_m, self.head_dim_v, self.num_consumer_warpgroups)
        return s + s // 2 + o

    @property
    def fits(self) -> bool:
        return _fits(self)


@dataclass(frozen=True)
class DqTile:
    """tile_m queries of dQ, as far as the order of its accumulator depends on the main kernel (`BackwardTile`)."""

    head_dim: int
    tile_m: int
    has_p_in_smem: bool

    @property
    def is_transposed(self) -> bool:
        """Whether the product is dQ^T = K^T dS^T instead of dQ = dS K, so that each warpgroup has 64 columns of the head."""
        return not self.has_p_in_smem and self.head_dim == 128


@dataclass(frozen=True)
class BackwardTile:
    """tile_n keys, whose K and V stay in shared memory, against a stream of blocks of tile_m queries.

    Q comes with its lse and dO with its delta, one ring each.
    has_p_in_smem: P and dS are MMA operands from shared memory (P then has buffers like dS) instead of registers.
    has_dq_staging: dQ goes through an fp32 buffer to a bulk reduction; False if it is added from registers.
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    has_p_in_smem: bool = False
    has_dq_staging: bool = True

    @property
    def num_consumer_warpgroups(self) -> int:
        return BACKWARD_WARPGROUPS

    @property
    def dq(self) -> DqTile:
        return DqTile(self.head_dim, self.tile_m, self.has_p_in_smem)

    @property
    def has_room_for_both(self) -> bool:
        """Whether dV and dK, which leave through the buffers of dS and P, fit there at the same time; else dK leaves through
        that of dQ, if there is one, or after dV."""
        return self.head_dim + self.head_dim_v <= self._columns_for_results

    @property
    def has_room_for_converters(self) -> bool:
        """In shared memory, and for ptxas in registers, where it finds none beside P from shared memory."""
        has_smem = self.smem_bytes + CONVERTERS * CHUNK_BYTES <= MAX_SMEM_BYTES_PER_BLOCK
        return has_smem and not self.has_p_in_smem

    @property
    def smem_bytes(self) -> int:
        """K, V, the rings of Q and dO, dS (and P), dQ; then lse, delta, mbarriers and tiles. Converters take CHUNK_BYTES each."""
        k, v = (_buffer_bytes(1, self.tile_n, dim) for dim in (self.head_dim, self.head_dim_v))
        q, do = (_buffer_bytes(BACKWARD_STAGES, self.tile_m, dim) for dim in (self.head_dim, self.head_dim_v))
        ds = _buffer_bytes(BACKWARD_STAGES, self.tile_m, self.tile_n)
        p = ds if self.has_p_in_smem else 0
        dq = _align(self.tile_m * self.head_dim * FP32_BYTES) if self.has_dq_staging else 0
        statistics = 2 * BACKWARD_STAGES * self.tile_m * FP32_BYTES
        barriers = (2 * 1 + 2 * BACKWARD_STAGES + 2 + CONVERTERS + 2 * 2) * 2 * MBARRIER_BYTES
        tiles = 16 * FP32_BYTES
        return k + v + q + do + ds + p + dq + _align(statistics + barriers + tiles)

    @property
    def registers_per_thread(self) -> int:
        """Of a consumer thread: dK and dV, and the larger of S with dP and of dQ with P and dS (16 bits)."""
        warpgroups = self.num_consumer_warpgroups
        dk, dv = (_registers(self.tile_n, dim, warpgroups) for dim in (self.head_dim, self.head_dim_v))
        s = dp = _registers(self.tile_n, self.tile_m, warpgroups)
        p_and_ds = 0 if self.has_p_in_smem else s // 2 + dp // 2
        dq = _registers(self.tile_m, self.head_dim, warpgroups)
        return dk + dv + max(s + dp, dq + p_and_ds)

    @property
    def has_tight_registers(self) -> bool:
        """Whether lse or delta, of which a thread holds two columns in eight, have to live on OTHER_REGISTERS."""
        statistics = self.tile_m // 4
        return self.registers_per_thread + statistics > _available_registers(self)

    @property
    def fits(self) -> bool:
        """As of all tiles; and dV, and dK where dQ has no buffer, leave through those of dS and P."""
        widest = self.head_dim_v if self.has_dq_staging else max(self.head_dim, self.head_dim_v)
        return _fits(self) and widest <= self._columns_for_results

    @property
    def _columns_for_results(self) -> int:
        """Numbers for each key in the buffers of dS and P."""
        return BACKWARD_STAGES * self.tile_m * (1 + self.has_p_in_smem)


def _fits(tile: ForwardTile | BackwardTile) -> bool:
    """Necessary, not sufficient: shared memory within a block's limit, matrices within a consumer's registers."""
    return tile.smem_bytes <= MAX_SMEM_BYTES_PER_BLOCK and tile.registers_per_thread <= _available_registers(tile)


def _available_registers(tile: ForwardTile | BackwardTile) -> int:
    return REGISTER_SPLITS[tile.num_consumer_warpgroups].consumer - OTHER_REGISTERS


def _buffer_bytes(num_stages: int, rows: int, columns: int) -> int:
    return num_stages * _align(rows * columns * OPERAND_BYTES)


def _registers(rows: int, columns: int, num_warpgroups: int) -> int:
    """fp32 registers per thread of a matrix spread over whole warpgroups."""
    return rows * columns // (num_warpgroups * WARPGROUP_THREADS)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // SMEM_ALIGNMENT) * SMEM_ALIGNMENT
