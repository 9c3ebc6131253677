"""Records for the tests of figures, and what is asked of every figure."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from flce_dist.launch.bench.report import Record

MIB = 2**20
RESULTS = Path(__file__).parents[1] / "docs" / "results"
ABOUT = {
    "hardware": "Some GPU",
    "ranks": 1,
    "commit": "abc1234",
    "torch": "2.11.0",
    "nccl": None,
    "peers": {"liger-kernel": "0.8.5", "cut-cross-entropy": None},
}


def record(impl: str, ms: float | None, **fields: Any) -> Record:
    floor = impl.startswith("gemm")
    plain = Record(
        "floor" if floor else "linear_cross_entropy",
        impl, None, "bf16", 8, 64, 16, 1, "forward_backward", None, False,
        p20_ms=ms, p50_ms=ms, p80_ms=ms, workspace_mib=None if floor else 100.0,
    )  # fmt: skip
    return replace(plain, **fields)


GRADIENTS = [
    record("gemm4", 13.0),
    record("gemm3", 10.0),
    record("triton", 11.0, schedule="cached", workspace_mib=0.0),
    record("canonical", 15.0),
    record("cce", 40.0, status="wrong", message="dweight is off by 1e-1"),
    record("cce_exact", None, status="error", message="OutOfMemoryError: CUDA out. Of memory"),
    record("liger", None, status="skipped", message="liger-kernel is not installed"),
    # As older files have them.
    record("indexed", None, status="error", message="rank 0: NotInstalled: it is not there"),
]


def assert_readable(figure: Figure) -> None:
    """All texts lie within the figure, none over another; lines pass behind only, none of data."""
    figure.draw_without_rendering()
    outside: set[Text] = set()  # labels of ticks beyond an axis's limits are not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        first, last = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not first <= tick.get_loc() <= last:
                outside |= {tick.label1, tick.label2}
    boxes: dict[str, Bbox] = {}
    for text in set(figure.findobj(Text)) - outside:
        if isinstance(text, Text) and text.get_visible() and text.get_text().strip():
            box = text.get_window_extent()
            kept = Bbox.intersection(box, figure.bbox)
            inside = kept is not None and np.allclose(kept.extents, box.extents, atol=0.5)
            assert inside, f"clipped: {text.get_text()!r}"
            boxes[f"{text.get_text()!r} {len(boxes)}"] = box
    for (a, box), (b, other) in itertools.combinations(boxes.items(), 2):
        common = Bbox.intersection(box, other)
        assert common is None or min(common.size) < 0.5, f"{a} over {b}"
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_linestyle() != "None"]
        for text, line in itertools.product(axes.texts, lines):
            path = line.get_transform().transform_path(line.get_path())
            behind = line.get_color() == "black" and text.get_bbox_patch() is not None
            crossed = path.intersects_bbox(text.get_window_extent(), filled=False)
            assert behind or not crossed, f"a line through {text.get_text()!r}"


def texts(figure: Figure, panel: int = 0) -> list[str]:
    return [text.get_text().strip() for text in figure.axes[panel].texts]
