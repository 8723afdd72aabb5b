# SPDX-License-Identifier: Apache-2.0
"""How long an SGLang engine with requests in flight is paused for a sync, beyond the load of the weights."""
