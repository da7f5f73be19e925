# SPDX-License-Identifier: Apache-2.0
"""`fullshard train --engine jax`: the same models, data and reports on the engine `fullshard.jax`.

Nothing in here loads torch.
"""
