# SPDX-License-Identifier: Apache-2.0
"""The transfer from a trainer on one GPU into an SGLang engine on another, beside verl's own and another project's."""
