"""Gradient transformations for training on many workers with optax.

Example:
  The order in which a large-batch recipe chains them, here the recipe of BERT in float16:

  >>> import optax
  >>> from jaxhetero.optimizers import accumulate_gradients, dynamic_loss_scale, lamb
  >>> reduced = optax.chain(jaxhetero.all_reduce_gradients(), dynamic_loss_scale(lamb(6e-3)))
  >>> optimizer = accumulate_gradients(reduced, every=4)
  >>> opt_state = optimizer.init({"w": jnp.ones((2, 3))})
"""

from jaxhetero.optimizers.accumulation import AccumulationState as AccumulationState
from jaxhetero.optimizers.accumulation import accumulate_gradients as accumulate_gradients
from jaxhetero.optimizers.across_steps import AcrossSteps as AcrossSteps
from jaxhetero.optimizers.across_steps import AcrossStepsState as AcrossStepsState
from jaxhetero.optimizers.across_steps import across_steps as across_steps
from jaxhetero.optimizers.at_reducers import ReducersOptimizer as ReducersOptimizer
from jaxhetero.optimizers.at_reducers import ReducersState as ReducersState
from jaxhetero.optimizers.at_reducers import on_reducers as on_reducers
from jaxhetero.optimizers.compression import ErrorFeedbackState as ErrorFeedbackState
from jaxhetero.optimizers.compression import error_feedback as error_feedback
from jaxhetero.optimizers.exact_mean import ExactMean as ExactMean
from jaxhetero.optimizers.exact_mean import ExactResult as ExactResult
from jaxhetero.optimizers.exact_mean import ExactSums as ExactSums
from jaxhetero.optimizers.layerwise import lamb as lamb
from jaxhetero.optimizers.layerwise import lars as lars
from jaxhetero.optimizers.local_steps import LocalSteps as LocalSteps
from jaxhetero.optimizers.local_steps import LocalStepsState as LocalStepsState
from jaxhetero.optimizers.local_steps import local_steps as local_steps
from jaxhetero.optimizers.loss_scaling import LossScaleState as LossScaleState
from jaxhetero.optimizers.loss_scaling import dynamic_loss_scale as dynamic_loss_scale
from jaxhetero.optimizers.loss_scaling import scale_loss as scale_loss
from jaxhetero.optimizers.loss_scaling import static_loss_scale as static_loss_scale
from jaxhetero.optimizers.reduction import all_reduce_gradients as all_reduce_gradients
