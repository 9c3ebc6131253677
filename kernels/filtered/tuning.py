"""Tile sizes of the GEMMs that read kept tiles, per GPU architecture; measured on an H200 alone."""

from dataclasses import dataclass

from flce_dist.kernels.tuning import INTERPRETED


@dataclass(frozen=True)
class GemmConfig:
    """Tile of the GEMMs that read kept tiles, and how they are scheduled.

    GROUP blocks of H come for all columns before the next; PROGRAMS is the largest grid, per
    multiprocessor. Both are of dweight.
    """

    BLOCK_ROW: int
    BLOCK_COL: int
    BLOCK_K: int
    GROUP: int
    PROGRAMS: int
    num_warps: int
    num_stages: int


GEMMS = {
    ("sm_80", 2): GemmConfig(128, 128, 32, 8, 16, 8, 3),
    ("sm_80", 4): GemmConfig(64, 64, 32, 16, 16, 4, 3),
    ("sm_90", 2): GemmConfig(128, 256, 64, 4, 4, 8, 3),
    ("sm_90", 4): GemmConfig(64, 64, 32, 16, 16, 8, 3),
    ("sm_100", 2): GemmConfig(128, 128, 64, 8, 16, 8, 4),
    ("sm_100", 4): GemmConfig(64, 64, 32, 16, 16, 8, 3),
    ("sm_120", 2): GemmConfig(128, 128, 32, 8, 16, 8, 3),
    ("sm_120", 4): GemmConfig(64, 64, 32, 16, 16, 8, 3),
    (INTERPRETED, 2): GemmConfig(64, 64, 64, 2, 4, 4, 1),
    (INTERPRETED, 4): GemmConfig(64, 64, 64, 2, 4, 4, 1),
}
