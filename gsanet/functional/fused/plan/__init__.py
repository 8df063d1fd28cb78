"""How a shape is cut into blocks: the constants that kernels are compiled with, their grids and their shared memory.

The sizes here are those that the kernels' sources work out for themselves (`kernels/tiles.cuh`, `kernels/scores.cuh`).
"""

from gsanet.functional.fused.plan.channel_map import plan_channel_map
from gsanet.functional.fused.plan.context import plan_context
from gsanet.functional.fused.plan.lines import LONGEST, plan_line
from gsanet.functional.fused.plan.maps import plan_kept, plan_local, plan_norm, plan_pool, plan_sums, plan_table
from gsanet.functional.fused.plan.pixel_products import plan_pixel_products
from gsanet.functional.fused.plan.product import plan_product
from gsanet.functional.fused.plan.projection import plan_projection
from gsanet.functional.fused.plan.shape import SCALARS, WIDTHS, Launch, Machine, Shape, bundle_of, machine_of

__all__ = [
    "LONGEST",
    "SCALARS",
    "WIDTHS",
    "Launch",
    "Machine",
    "Shape",
    "bundle_of",
    "machine_of",
    "plan_channel_map",
    "plan_context",
    "plan_kept",
    "plan_line",
    "plan_local",
    "plan_norm",
    "plan_pixel_products",
    "plan_pool",
    "plan_product",
    "plan_projection",
    "plan_sums",
    "plan_table",
]
