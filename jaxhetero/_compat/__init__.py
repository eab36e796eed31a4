"""The only package that uses names which JAX does not promise to keep, each with its reason and its versions of JAX.

"Since 0.10" means: written for JAX 0.10, the oldest release that jaxhetero accepts (0.10.2). Every entry was last
checked with JAX 0.10.2 and 0.12.0. When a later JAX changes one, tests of the collectives fail, and the fix is here.
"""

from jaxhetero._compat.axes import bind_axis as bind_axis
from jaxhetero._compat.axes import bound_axes as bound_axes
from jaxhetero._compat.axes import free_axes as free_axes
from jaxhetero._compat.axes import is_bound_here as is_bound_here
from jaxhetero._compat.axes import partly_reduced_axes as partly_reduced_axes
from jaxhetero._compat.axes import summable_axes as summable_axes
from jaxhetero._compat.axes import unbound_axis as unbound_axis
from jaxhetero._compat.axes import unreduced_axes as unreduced_axes
from jaxhetero._compat.axes import varying_axes as varying_axes
from jaxhetero._compat.axes import varying_instead_of_unreduced as varying_instead_of_unreduced
from jaxhetero._compat.axes import without_varying_axis as without_varying_axis
from jaxhetero._compat.effects import SideEffect as SideEffect
from jaxhetero._compat.equations import COLLECTIVES as COLLECTIVES
from jaxhetero._compat.equations import Equation as Equation
from jaxhetero._compat.equations import bind as bind
from jaxhetero._compat.equations import equation_context as equation_context
from jaxhetero._compat.equations import expansion as expansion
from jaxhetero._compat.equations import has_rules as has_rules
from jaxhetero._compat.equations import inlined_program as inlined_program
from jaxhetero._compat.equations import inner_programs as inner_programs
from jaxhetero._compat.equations import is_ordered as is_ordered
from jaxhetero._compat.equations import mesh_axes as mesh_axes
from jaxhetero._compat.equations import retrace as retrace
from jaxhetero._compat.equations import run_equation as run_equation
from jaxhetero._compat.equations import run_with_rules as run_with_rules
from jaxhetero._compat.equations import scan_counts as scan_counts
from jaxhetero._compat.equations import with_inner_programs as with_inner_programs
from jaxhetero._compat.equations import with_params as with_params
from jaxhetero._compat.frames import describe_caller as describe_caller
from jaxhetero._compat.frames import describe_flattener as describe_flattener
from jaxhetero._compat.frames import equation_functions as equation_functions
from jaxhetero._compat.frames import equation_source as equation_source
from jaxhetero._compat.frames import is_of_our_collectives as is_of_our_collectives
from jaxhetero._compat.frames import is_within as is_within
from jaxhetero._compat.frames import source_name as source_name
from jaxhetero._compat.interception import Interceptor as Interceptor
from jaxhetero._compat.interception import intercept as intercept
from jaxhetero._compat.interception import intercept_everywhere as intercept_everywhere
from jaxhetero._compat.interception import intercept_otherwise as intercept_otherwise
from jaxhetero._compat.interception import interceptor as interceptor
from jaxhetero._compat.interception import is_tracing as is_tracing
from jaxhetero._compat.interception import with_values as with_values
from jaxhetero._compat.lowering import is_computed as is_computed
from jaxhetero._compat.lowering import lower_on_gpu_stream as lower_on_gpu_stream
from jaxhetero._compat.lowering import lower_to_barrier as lower_to_barrier
from jaxhetero._compat.lowering import operation_name as operation_name
from jaxhetero._compat.lowering import place_in_program as place_in_program
from jaxhetero._compat.lowering import program_device_count as program_device_count
from jaxhetero._compat.lowering import program_mesh as program_mesh
from jaxhetero._compat.lowering import register_lowering as register_lowering
from jaxhetero._compat.processes import distributed_coordinator as distributed_coordinator
from jaxhetero._compat.processes import distributed_place as distributed_place
from jaxhetero._compat.processes import distributed_publish as distributed_publish
from jaxhetero._compat.processes import distributed_read as distributed_read
