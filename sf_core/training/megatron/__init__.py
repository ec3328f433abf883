"""The Megatron-core backend: a policy cut into tensor-parallel parts and stages of a pipeline."""

import warnings

# of Apex and Transformer Engine, which this backend does without
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
